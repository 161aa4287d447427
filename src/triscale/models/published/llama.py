"""Llama: the baseline decoder (grouped-query attention with rotary positions, SwiGLU, standard residuals)."""

from __future__ import annotations

from typing import Any

from triscale.models.decoder import Decoder
from triscale.nn.feed_forward import SwiGLU, default_hidden
from triscale.nn.grouped_query_attention import GroupedQueryAttention
from triscale.nn.residual import StandardResidual

from .family import Family, Fields, Published, refuse
from .names import Naming


def read(published: Published) -> Decoder.Config:
    fields = Fields(published)
    fields.expect("hidden_act", "silu")
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    rope = Fields(fields.get("rope_parameters", {}), "config.json: rope_parameters")
    rope.expect("rope_type", "default")
    fields.expect("rope_scaling", None)
    mixer = GroupedQueryAttention.Config(
        heads=fields.need("num_attention_heads"),
        kv_heads=fields.get("num_key_value_heads"),
        head_dim=fields.get("head_dim"),
        rope_theta=float(fields.get("rope_theta", rope.get("rope_theta", 10000.0))),
    )
    return Decoder.Config(
        width=fields.need("hidden_size"),
        depth=fields.need("num_hidden_layers"),
        vocabulary=fields.need("vocab_size"),
        mixer=mixer,
        feed_forward=SwiGLU.Config(hidden=fields.need("intermediate_size")),
        tied_head=bool(fields.get("tie_word_embeddings", False)),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
    )


def write(config: Decoder.Config) -> dict[str, Any]:
    mixer, feed_forward = config.mixer, config.feed_forward
    if not isinstance(mixer, GroupedQueryAttention.Config):
        raise refuse("model.mixer", type(mixer).__qualname__.partition(".")[0], "llama")
    if not isinstance(config.residual, StandardResidual.Config):
        raise refuse("model.residual", type(config.residual).__qualname__.partition(".")[0], "llama")
    if not isinstance(feed_forward, SwiGLU.Config) or config.first_dense:
        raise refuse("model.feed_forward", "anything but one SwiGLU", "llama")
    if mixer.qk_norm or not mixer.rope_theta:
        raise refuse("model.mixer", "qk_norm or attention without rotary positions", "llama")
    if config.width % mixer.heads:
        raise refuse("model.mixer.heads", f"a width of {config.width} that {mixer.heads} heads do not divide", "llama",
                     "Its readers refuse such a config even with head_dim given")  # fmt: skip
    head_dim = mixer.head_dim or config.width // mixer.heads
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "intermediate_size": feed_forward.hidden or default_hidden(config.width),
        "max_position_embeddings": 1 << 20,
        "mlp_bias": False,
        "num_attention_heads": mixer.heads,
        "num_hidden_layers": config.depth,
        "num_key_value_heads": mixer.kv_heads or mixer.heads,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": mixer.rope_theta,
        "tie_word_embeddings": config.tied_head,
        "use_cache": True,
        "vocab_size": config.vocabulary,
    }


FAMILY = Family(name="llama", model_types=("llama",), naming=Naming(), read=read, write=write)
