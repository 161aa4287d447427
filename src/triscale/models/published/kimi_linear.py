"""Kimi Linear 48B format: a hybrid of delta attention and latent attention without positions, experts."""

from __future__ import annotations

from typing import Any

from triscale.models.decoder import Decoder
from triscale.nn.delta_attention import KimiDeltaAttention
from triscale.nn.feed_forward import SwiGLU
from triscale.nn.hybrid import Hybrid
from triscale.nn.latent_attention import LatentAttention
from triscale.nn.mixture_of_experts import MixtureOfExperts
from triscale.nn.residual import StandardResidual

from .deepseek_v3 import balance, read_decoder, split_feed_forward
from .family import Family, Fields, Published, refuse
from .names import Naming

NAME = "kimi_linear"


def read(published: Published) -> Decoder.Config:
    fields = Fields(published)
    fields.expect("hidden_act", "silu")
    return read_decoder(fields, read_hybrid(fields), lambda fields: MixtureOfExperts.Config(**read_experts(fields)))


def read_hybrid(fields: Fields) -> Hybrid.Config:
    """The mixers; ``linear_attn_config`` lists layers from 1."""
    fields.expect("mla_use_nope", True)
    heads = fields.need("num_attention_heads")
    fields.expect("num_key_value_heads", heads, None)
    latent = LatentAttention.Config(
        heads=heads,
        q_lora_rank=fields.get("q_lora_rank"),
        kv_lora_rank=fields.need("kv_lora_rank"),
        qk_nope_head_dim=fields.need("qk_nope_head_dim"),
        qk_rope_head_dim=fields.need("qk_rope_head_dim"),
        v_head_dim=fields.need("v_head_dim"),
        rope_theta=0.0,
        output_gate=bool(fields.get("mla_use_output_gate", False)),
    )
    linear = fields.table("linear_attn_config")
    bound, full_rank = linear.get("gate_lower_bound"), bool(linear.get("use_full_rank_gate", False))
    delta = KimiDeltaAttention.Config(
        heads=linear.need("num_heads"),
        head_dim=linear.need("head_dim"),
        convolution=linear.get("short_conv_kernel_size", 4),
        gate="softplus" if bound is None else "bounded",
        lower_bound=-5.0 if bound is None else float(bound),
        output_gate="full_rank" if full_rank else "low_rank",
    )
    depth = fields.need("num_hidden_layers")
    full = tuple(sorted(layer - 1 for layer in linear.need("full_attn_layers")))
    listed = sorted([*(layer + 1 for layer in full), *linear.get("kda_layers", [])])
    if linear.get("kda_layers") is not None and listed != list(range(1, depth + 1)):
        Fields({"kda_layers": "does not complement full_attn_layers"}, linear.path).expect("kda_layers", None)
    pattern = Hybrid.Config(linear=delta, full=latent)
    if full == tuple(layer for layer in range(depth) if pattern.is_full(layer, depth)):
        return pattern
    return Hybrid.Config(linear=delta, full=latent, full_layers=full)


def read_experts(fields: Fields) -> dict[str, Any]:
    fields.expect("moe_router_activation_func", "sigmoid")
    fields.expect("moe_layer_freq", 1)
    fields.expect("topk_method", "noaux_tc", None)
    experts, top_k = fields.need("num_experts"), fields.need("num_experts_per_token")
    return {
        **balance(experts, top_k),
        "experts": experts,
        "top_k": top_k,
        "hidden": fields.need("moe_intermediate_size"),
        "shared": fields.get("num_shared_experts", 0),
        "groups": fields.get("num_expert_group", 1),
        "top_groups": fields.get("topk_group", 1),
        "renormalize": bool(fields.get("moe_renormalize", True)),
        "routed_scaling": float(fields.get("routed_scaling_factor", 1.0)),
    }


def write(config: Decoder.Config) -> dict[str, Any]:
    if not isinstance(config.residual, StandardResidual.Config):
        raise refuse("model.residual", type(config.residual).__qualname__.partition(".")[0], NAME,
                     "Use the kimi_k3 format")  # fmt: skip
    delta, latent = split_hybrid(config, NAME)
    if delta.gate != "softplus" or delta.output_gate != "low_rank" or latent.output_gate:
        raise refuse("model.mixer", "a bounded gate, a full-rank gate or a gated latent attention", NAME,
                     "Use the kimi_k3 format")  # fmt: skip
    experts, dense = split_feed_forward(config, NAME, SwiGLU.Config)
    if experts is not None and (experts.latent is not None or experts.activation != "swiglu"):
        raise refuse("model.feed_forward", "a latent or SiTU mixture of experts", NAME, "Use the kimi_k3 format")
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_act": "silu",
        # a vestige of the release: width / heads, used by nothing
        "head_dim": config.width // latent.heads,
        "model_max_length": 1 << 20,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        **write_shape(config, latent),
        **write_experts(config, experts, dense),
        "linear_attn_config": write_linear(config, delta),
    }


def split_hybrid(config: Decoder.Config, family: str) -> tuple[KimiDeltaAttention.Config, LatentAttention.Config]:
    """The linear and the full mixer; refuses what the Kimi formats cannot say about them."""
    mixer = config.mixer
    if isinstance(mixer, Hybrid.Config):
        delta, latent = mixer.linear, mixer.full
    else:
        raise refuse("model.mixer", type(mixer).__qualname__.partition(".")[0], family)
    if not isinstance(delta, KimiDeltaAttention.Config) or not isinstance(latent, LatentAttention.Config):
        raise refuse("model.mixer", "a hybrid of anything but delta_attention and latent_attention", family)
    if latent.rope_theta:
        raise refuse("model.mixer.full.rope_theta", "rotary positions", family, "Kimi's hybrids use none: set it to 0")
    key = delta.head_dim or config.width // delta.heads
    value = delta.value_head_dim or key
    if delta.decay != "channel" or (delta.value_heads or delta.heads) != delta.heads or value != key:
        raise refuse("model.mixer.linear", "a per-head decay or value heads unlike the key heads", family)
    if delta.gate_rank not in (None, key):
        raise refuse("model.mixer.linear.gate_rank", f"rank {delta.gate_rank}", family, f"Leave it out ({key})")
    return delta, latent.resolved(config.width)


def write_shape(config: Decoder.Config, latent: LatentAttention.Config) -> dict[str, Any]:
    return {
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "kv_lora_rank": latent.kv_lora_rank,
        "mla_use_nope": True,
        "num_attention_heads": latent.heads,
        "num_hidden_layers": config.depth,
        "num_key_value_heads": latent.heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": latent.q_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "use_cache": True,
        "v_head_dim": latent.v_head_dim,
        "vocab_size": config.vocabulary,
    }


def write_experts(config: Decoder.Config, experts: MixtureOfExperts.Config | None, dense: int) -> dict[str, Any]:
    used = experts or MixtureOfExperts.Config(hidden=dense, routed_scaling=1.0)
    return {
        "first_k_dense_replace": config.depth if experts is None else config.first_dense,
        "intermediate_size": dense,
        "moe_intermediate_size": used.expert_hidden(config.width),
        "moe_layer_freq": 1,
        "moe_renormalize": used.renormalize,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": used.groups,
        "num_experts": used.experts,
        "num_experts_per_token": used.top_k,
        "num_shared_experts": used.shared,
        "routed_scaling_factor": used.scaling(),
        "topk_group": used.top_groups,
        "use_grouped_topk": True,
    }


def write_linear(config: Decoder.Config, delta: KimiDeltaAttention.Config) -> dict[str, Any]:
    full = [layer + 1 for layer in range(config.depth) if config.mixer.is_full(layer, config.depth)]
    return {
        "full_attn_layers": full,
        "head_dim": delta.head_dim or config.width // delta.heads,
        "kda_layers": [layer for layer in range(1, config.depth + 1) if layer not in full],
        "num_heads": delta.heads,
        "short_conv_kernel_size": delta.convolution,
    }


FAMILY = Family(
    name=NAME,
    model_types=("kimi_linear",),
    naming=Naming(block="block_sparse_moe", expert=("w1", "w3", "w2")),
    read=read,
    write=write,
    ties=False,
    keep_fp32=(r"\.A_log", r"\.dt_bias", r"\.e_score_correction_bias"),
    a_log=lambda heads: (1, 1, heads, 1),
)
