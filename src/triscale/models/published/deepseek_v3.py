"""DeepSeek-V3 format: Moonlight, Kimi K2 and K2.5's text model (latent attention with rotary positions, experts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triscale.models.decoder import Decoder
from triscale.nn.balancing import NoBalance
from triscale.nn.feed_forward import SwiGLU, default_hidden
from triscale.nn.latent_attention import LatentAttention
from triscale.nn.mixture_of_experts import MixtureOfExperts
from triscale.nn.residual import StandardResidual
from triscale.ops.yarn import Yarn

from .family import Family, Fields, Published, refuse
from .names import Naming

NAME = "deepseek_v3"


def read(published: Published) -> Decoder.Config:
    fields = Fields(published)
    fields.expect("hidden_act", "silu")
    fields.expect("attention_bias", False)
    fields.expect("scoring_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc", None)
    fields.expect("moe_layer_freq", 1)
    fields.expect("rope_interleave", True)
    return read_decoder(fields, _read_attention(fields), _read_experts, eps=1e-6)


def read_decoder(
    fields: Fields,
    mixer: Any,
    experts: Callable[[Fields], MixtureOfExperts.Config],
    *,
    plain: Any = None,
    residual: Any = None,
    eps: float = 1e-5,
) -> Decoder.Config:
    """What all families of experts behind some dense layers share. plain: the dense layers, SwiGLU by default; eps: of
    the norms where the file does not say. ``experts`` is read only if some layer has them."""
    depth, dense = fields.need("num_hidden_layers"), fields.get("first_k_dense_replace", 0)
    if plain is None:
        plain = SwiGLU.Config(hidden=fields.need("intermediate_size"))
    return Decoder.Config(
        width=fields.need("hidden_size"),
        depth=depth,
        vocabulary=fields.need("vocab_size"),
        mixer=mixer,
        residual=residual if residual is not None else StandardResidual.Config(),
        feed_forward=plain if dense >= depth else experts(fields),
        first_dense=0 if dense >= depth else dense,
        dense_feed_forward=plain,
        tied_head=bool(fields.get("tie_word_embeddings", False)),
        norm_eps=float(fields.get("rms_norm_eps", eps)),
    )


def _read_attention(fields: Fields) -> LatentAttention.Config:
    heads = fields.need("num_attention_heads")
    fields.expect("num_key_value_heads", heads, None)
    # transformers 5 writes rope_parameters; the publishers write rope_theta and rope_scaling
    rope = fields.get("rope_parameters", {})
    scaling = fields.get("rope_scaling", rope)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "yarn"):
        Fields({"type": kind}, "config.json: rope_scaling").expect("type", "yarn", "default")
    return LatentAttention.Config(
        heads=heads,
        q_lora_rank=fields.get("q_lora_rank"),
        kv_lora_rank=fields.need("kv_lora_rank"),
        qk_nope_head_dim=fields.need("qk_nope_head_dim"),
        qk_rope_head_dim=fields.need("qk_rope_head_dim"),
        v_head_dim=fields.need("v_head_dim"),
        rope_theta=float(fields.get("rope_theta", rope.get("rope_theta", 10000.0))),
        yarn=_read_yarn(Fields(scaling, "config.json: rope_scaling")) if kind == "yarn" else None,
    )


def _read_yarn(scaling: Fields) -> Yarn:
    return Yarn(
        factor=float(scaling.need("factor")),
        original_context=int(scaling.need("original_max_position_embeddings")),
        beta_fast=float(scaling.get("beta_fast", 32)),
        beta_slow=float(scaling.get("beta_slow", 1)),
        mscale=float(scaling.get("mscale", 1)),
        mscale_all_dim=float(scaling.get("mscale_all_dim", 0)),
    )


def _read_experts(fields: Fields) -> MixtureOfExperts.Config:
    experts, top_k = fields.need("n_routed_experts"), fields.need("num_experts_per_tok")
    return MixtureOfExperts.Config(
        **balance(experts, top_k),
        experts=experts,
        top_k=top_k,
        hidden=fields.need("moe_intermediate_size"),
        shared=fields.get("n_shared_experts", 0),
        groups=fields.get("n_group", 1),
        top_groups=fields.get("topk_group", 1),
        renormalize=bool(fields.get("norm_topk_prob", True)),
        routed_scaling=float(fields.get("routed_scaling_factor", 1.0)),
    )


def balance(experts: int, top_k: int) -> dict[str, Any]:
    """Routers are balanced by the default rule when trained on, unless every expert is always active."""
    return {"balance": NoBalance.Config()} if top_k >= experts else {}


def write(config: Decoder.Config) -> dict[str, Any]:
    mixer, residual = config.mixer, config.residual
    if not isinstance(mixer, LatentAttention.Config):
        raise refuse("model.mixer", type(mixer).__qualname__.partition(".")[0], NAME)
    mixer = mixer.resolved(config.width)
    if not isinstance(residual, StandardResidual.Config):
        raise refuse("model.residual", type(residual).__qualname__.partition(".")[0], NAME,
                     "Attention residuals exist in the kimi_k3 format only")  # fmt: skip
    if not mixer.rope_theta or not mixer.qk_rope_head_dim:
        raise refuse("model.mixer.rope_theta", "attention without rotary positions", NAME)
    if mixer.output_gate:
        raise refuse("model.mixer.output_gate", "a gated output", NAME)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "kv_lora_rank": mixer.kv_lora_rank,
        "max_position_embeddings": _context(mixer.yarn),
        "num_attention_heads": mixer.heads,
        "num_hidden_layers": config.depth,
        "num_key_value_heads": mixer.heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": mixer.q_lora_rank,
        "qk_nope_head_dim": mixer.qk_nope_head_dim,
        "qk_rope_head_dim": mixer.qk_rope_head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": write_yarn(mixer.yarn),
        "rope_theta": mixer.rope_theta,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": config.tied_head,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": mixer.v_head_dim,
        "vocab_size": config.vocabulary,
        **_write_feed_forward(config),
    }


def _context(yarn: Yarn | None) -> int:
    return int(yarn.factor * yarn.original_context) if yarn else 1 << 20


def write_yarn(yarn: Yarn | None) -> dict[str, Any] | None:
    if yarn is None:
        return None
    return {
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "factor": yarn.factor,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
        "original_max_position_embeddings": yarn.original_context,
        "type": "yarn",
    }


def _write_feed_forward(config: Decoder.Config) -> dict[str, Any]:
    """A model without experts writes itself as dense in all layers, with the fields of the unused experts in place."""
    experts, dense = split_feed_forward(config, NAME, SwiGLU.Config)
    if experts is not None and (experts.latent is not None or experts.activation != "swiglu"):
        raise refuse("model.feed_forward", "a latent or SiTU mixture of experts", NAME, "Use the kimi_k3 format")
    used = experts or MixtureOfExperts.Config(hidden=dense, routed_scaling=1.0)
    return {
        "first_k_dense_replace": config.depth if experts is None else config.first_dense,
        "intermediate_size": dense,
        "moe_intermediate_size": used.expert_hidden(config.width),
        "moe_layer_freq": 1,
        "n_group": used.groups,
        "n_routed_experts": used.experts,
        "n_shared_experts": used.shared,
        "norm_topk_prob": used.renormalize,
        "num_experts_per_tok": used.top_k,
        "routed_scaling_factor": used.scaling(),
        "topk_group": used.top_groups,
    }


def split_feed_forward(config: Decoder.Config, family: str, plain: type) -> tuple[MixtureOfExperts.Config | None, int]:
    """The mixture of experts (None: dense throughout) and the inner width of the dense layers."""
    experts = config.feed_forward if isinstance(config.feed_forward, MixtureOfExperts.Config) else None
    if experts is not None and experts.shared < 1:
        raise refuse("model.feed_forward.shared", "a mixture without a shared expert", family)
    dense = config.dense_feed_forward if experts is not None else config.feed_forward
    if experts is not None and not config.first_dense:
        return experts, default_hidden(config.width)
    if not isinstance(dense, plain) or (experts is None and config.first_dense):
        raise refuse("model.feed_forward", f"{type(dense).__qualname__.partition('.')[0]} in dense layers", family)
    return experts, dense.hidden or default_hidden(config.width)  # type: ignore[attr-defined]


FAMILY = Family(name=NAME, model_types=("deepseek_v3", "kimi_k2"), naming=Naming(), read=read, write=write)
