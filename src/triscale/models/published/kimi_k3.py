"""Kimi K3 format: Kimi Linear with bounded and full-rank gates, block Attention Residuals and Stable LatentMoE.

Text tensors carry the prefix ``language_model.``; the config sits in ``text_config``. The released decay rates are
stored zero-padded (128 values for 96 heads); reading takes the first ones, writing adds no padding of its own.
"""

from __future__ import annotations

from typing import Any

from triscale.config import ConfigError
from triscale.models.decoder import Decoder
from triscale.nn.mixture_of_experts import MixtureOfExperts
from triscale.nn.residual import BlockAttentionResidual, StandardResidual
from triscale.nn.situ import SituGLU

from .deepseek_v3 import read_decoder, split_feed_forward
from .family import Family, Fields, Published, refuse
from .kimi_linear import read_experts, read_hybrid, split_hybrid, write_experts, write_linear, write_shape
from .names import Naming
from .vision import kimi_k3_vision

NAME = "kimi_k3"


def read(published: Published) -> Decoder.Config:
    fields = Fields(published)
    if "text_config" in published:
        fields = fields.table("text_config")
    fields.expect("hidden_act", "situ")
    beta, linear_beta = (
        float(fields.get("activation_situ_beta", 4)),
        float(fields.get("activation_situ_linear_beta", 25)),
    )
    plain = SituGLU.Config(hidden=fields.need("intermediate_size"), beta=beta, linear_beta=linear_beta)
    experts = lambda fields: MixtureOfExperts.Config(
        **read_experts(fields),
        latent=fields.get("routed_expert_hidden_size"),
        latent_norm=bool(fields.get("latent_moe_use_norm", False)),
        activation="situ_glu",
        situ_beta=beta,
        situ_linear_beta=linear_beta,
    )
    # published in decoder layers; ours counts sublayers
    block = fields.get("attn_res_block_size")
    residual = StandardResidual.Config() if block is None else BlockAttentionResidual.Config(block=2 * block)
    return read_decoder(fields, read_hybrid(fields), experts, plain=plain, residual=residual)


def write(config: Decoder.Config) -> dict[str, Any]:
    delta, latent = split_hybrid(config, NAME)
    if delta.gate != "bounded" or delta.output_gate != "full_rank":
        raise refuse("model.mixer.linear", "a softplus or low-rank gate", NAME, "Use the kimi_linear format")
    experts, dense = split_feed_forward(config, NAME, SituGLU.Config)
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_act": "situ",
        "max_position_embeddings": 1 << 20,
        "mla_use_output_gate": latent.output_gate,
        **_write_block(config),
        **_write_activation(config, experts),
        **write_shape(config, latent),
        **write_experts(config, experts, dense),
        "topk_method": "noaux_tc",
        "linear_attn_config": {
            **write_linear(config, delta),
            "gate_lower_bound": delta.lower_bound,
            "use_full_rank_gate": True,
        },
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": config.tied_head,
    }


def _write_block(config: Decoder.Config) -> dict[str, Any]:
    if isinstance(config.residual, StandardResidual.Config):
        return {}
    if not isinstance(config.residual, BlockAttentionResidual.Config):
        raise refuse("model.residual", "full attention over depth", NAME, "It writes blocks: use block_attention")
    block = config.residual.block
    if block % 2:
        raise ConfigError("model.residual.block", f"{block} sublayers are not whole decoder layers",
                          "The kimi_k3 format counts decoder layers: use an even block")  # fmt: skip
    return {"attn_res_block_size": block // 2}


def _write_activation(config: Decoder.Config, experts: MixtureOfExperts.Config | None) -> dict[str, Any]:
    dense = config.dense_feed_forward if experts is not None else config.feed_forward
    if experts is None:
        return {"activation_situ_beta": dense.beta, "activation_situ_linear_beta": dense.linear_beta}
    if experts.activation != "situ_glu":
        raise refuse("model.feed_forward.activation", experts.activation, NAME, "Use situ_glu")
    betas = (experts.situ_beta, experts.situ_linear_beta)
    if config.first_dense and (dense.beta, dense.linear_beta) != betas:
        raise ConfigError("model.dense_feed_forward", "its SiTU bounds differ from the experts'",
                          "The kimi_k3 format has one pair for all layers")  # fmt: skip
    latent = {} if experts.latent is None else {
        "routed_expert_hidden_size": experts.latent,
        "latent_moe_use_norm": experts.latent_norm,
    }  # fmt: skip
    return {"activation_situ_beta": betas[0], "activation_situ_linear_beta": betas[1], **latent}


FAMILY = Family(
    name=NAME,
    model_types=("kimi_k3",),
    naming=Naming(prefix="language_model.", block="block_sparse_moe", expert=("w1", "w3", "w2")),
    read=read,
    write=write,
    ties=False,
    keep_fp32=(r"\.A_log", r"\.dt_bias", r"\.e_score_correction_bias", r"\.[qkv]_conv1d\.weight", r"\.o_norm\.weight"),
    aside=("vision_tower.", "mm_projector."),
    aside_shapes=kimi_k3_vision,
)
