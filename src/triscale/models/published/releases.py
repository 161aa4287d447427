"""The released models' config.json, field by field as published (only what describes the architecture and tokens).

Sources: moonshotai/Moonlight-16B-A3B, Kimi-Linear-48B-A3B, Kimi-K2, Kimi-K2.5 and Kimi-K3; reports arXiv 2502.16982,
2510.26692, 2507.20534, 2602.02276 and 2607.24653.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 163840

_DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 50000.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": VOCABULARY,
}


def _yarn(factor: float) -> dict[str, Any]:
    return {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": factor,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


MOONLIGHT: dict[str, Any] = {
    **_DEEPSEEK_V3,
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "routed_scaling_factor": 2.446,
}

KIMI_K2: dict[str, Any] = {
    **_DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-06,
    "rope_scaling": _yarn(32.0),
    "routed_scaling_factor": 2.827,
}

_VISION: dict[str, Any] = {
    "init_pos_emb_height": 64,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 7168,
    "vt_num_hidden_layers": 27,
}

KIMI_K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "pad_token_id": 163839,
    "text_config": {
        **KIMI_K2,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "max_position_embeddings": 262144,
        "pad_token_id": 163839,
        "rms_norm_eps": 1e-05,
        "rope_scaling": _yarn(64.0),
    },
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {
        **_VISION,
        "mm_hidden_size": 1152,
        "mm_projector_type": "patchmerger",
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
    },
}

_KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 163839,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": VOCABULARY,
}


def _layers(depth: int, heads: int, **rest: Any) -> dict[str, Any]:
    """Three delta layers, then one full; the last is full. Counted from 1, as published."""
    full = [layer for layer in range(1, depth + 1) if layer % 4 == 0 or layer == depth]
    return {
        "full_attn_layers": full,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, depth + 1) if layer not in full],
        "num_heads": heads,
        "short_conv_kernel_size": 4,
        **rest,
    }


KIMI_LINEAR_48B: dict[str, Any] = {
    **_KIMI_LINEAR,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "linear_attn_config": _layers(27, 32),
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
}

KIMI_K3: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "text_config": {
        **_KIMI_LINEAR,
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "hidden_act": "situ",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "latent_moe_use_norm": True,
        "linear_attn_config": _layers(93, 96, gate_lower_bound=-5.0, use_full_rank_gate=True),
        "max_position_embeddings": 1048576,
        "mla_use_output_gate": True,
        "moe_intermediate_size": 3072,
        "num_attention_heads": 96,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "num_key_value_heads": 96,
        "num_shared_experts": 2,
        "q_lora_rank": 1536,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
    },
    "tie_word_embeddings": False,
    "vision_config": {
        **_VISION,
        "attn_bias": False,
        "linear_bias": False,
        "mlp_type": "mlp2",
        "mm_hidden_size": 1024,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "pos_emb_interpolation_mode": "bilinear",
        "qkv_hidden_size": 1536,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
    },
}
