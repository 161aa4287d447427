"""Hugging Face models under MuonClip: their attention learns its roles and reports its logits.

Covers attention with ``q_proj, k_proj, v_proj`` (Llama, Qwen2, Qwen3, Mistral and others built alike), DeepSeek-V3
style latent attention and Kimi Linear's delta attention, as written in transformers 5. The logits are read through transformers' attention interface:
the model is switched to an implementation that is its SDPA one plus the exact, streamed maximum.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from triscale.config import ClipRows, Role, TriScaleError, require
from triscale.config.roles import grouped_query_clip
from triscale.ops.logit_maxima import fold, max_logits

IMPLEMENTATION = "triscale_sdpa"


def adapt(model: nn.Module) -> list[str]:
    """Declare the roles of ``model``'s attention and expert modules in place; returns the names of the former.

    Raises :class:`TriScaleError` if no attention module has a known layout.
    """
    found = []
    for name, module in model.named_modules():
        if all(hasattr(module, part) for part in ("kv_a_proj_with_mqa", "kv_b_proj", "qk_nope_head_dim")):
            _teach(module, _latent_roles)
            found.append(name)
        elif all(
            isinstance(getattr(module, part, None), nn.Linear) for part in ("q_proj", "v_proj", "b_proj", "g_b_proj")
        ):
            module.parameter_roles = functools.partial(_delta_roles, module)  # type: ignore[assignment]
            module.qk_clip_skip = "a delta rule has no softmax"  # type: ignore[assignment]
            found.append(name)
        elif all(isinstance(getattr(module, part, None), nn.Linear) for part in ("q_proj", "k_proj", "v_proj")):
            _teach(module, _grouped_roles)
            found.append(name)
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            module.parameter_roles = functools.partial(_expert_roles, module)  # type: ignore[assignment]
        elif hasattr(module, "e_score_correction_bias") and isinstance(getattr(module, "weight", None), nn.Parameter):
            module.parameter_roles = lambda: {"weight": Role(kind="router")}  # type: ignore[assignment]
    if not found:
        raise TriScaleError(
            f"{type(model).__name__} has no attention of a known layout (Llama, Qwen, DeepSeek-V3). Declare "
            "parameter_roles() on its attention modules, or use MuonClip(model, qk_clip_threshold=None)"
        )
    _install_probe(model)
    return found


def _teach(module: nn.Module, roles: Any) -> None:
    module.parameter_roles = functools.partial(roles, module)  # type: ignore[assignment]
    if _normalised(module):
        module.qk_clip_skip = "queries and keys are normalised"  # type: ignore[assignment]
        return
    device = next(module.parameters()).device
    maxima = torch.full((_heads(module),), -torch.inf, dtype=torch.float32, device=device)
    module.register_buffer("max_logits", maxima, persistent=False)
    module.record_max_logits = False  # type: ignore[assignment]


def _normalised(module: nn.Module) -> bool:
    return getattr(module, "q_norm", None) is not None


def _heads(module: Any) -> int:
    if hasattr(module, "num_heads"):
        return module.num_heads
    return module.q_proj.weight.shape[0] // module.head_dim


def _grouped_roles(module: Any) -> dict[str, Role]:
    """q, k and v by head; a bias belongs to its rows, so it is clipped with them."""
    heads, width = _heads(module), module.head_dim
    kv_heads = module.k_proj.weight.shape[0] // width
    queries, keys = ((), ()) if _normalised(module) else grouped_query_clip(heads, kv_heads, width)
    clips: dict[str, tuple[ClipRows, ...]] = {"q_proj": queries, "k_proj": keys, "v_proj": ()}
    roles = {}
    for name, clip in clips.items():
        count = heads if name == "q_proj" else kv_heads
        roles[f"{name}.weight"] = Role(kind="matrix", head_blocks=(width,) * count, clip=clip)
        if getattr(module, name).bias is not None:
            roles[f"{name}.bias"] = Role(kind="bias", clip=clip)
    return roles


def _latent_roles(module: Any) -> dict[str, Role]:
    """Content rows by the square root of gamma, rotary query rows by gamma, the shared rotary key untouched."""
    heads, nope, rope = module.num_heads, module.qk_nope_head_dim, module.qk_rope_head_dim
    query, key_value = nope + rope, nope + module.v_head_dim
    name = "q_proj" if getattr(module, "q_proj", None) is not None else "q_b_proj"
    content = tuple(ClipRows(h, h * query, h * query + nope, 0.5) for h in range(heads))
    rotary = tuple(ClipRows(h, h * query + nope, (h + 1) * query, 1.0) for h in range(heads))
    keys = tuple(ClipRows(h, h * key_value, h * key_value + nope, 0.5) for h in range(heads))
    roles = {
        f"{name}.weight": Role(kind="matrix", head_blocks=(query,) * heads, clip=content + rotary),
        "kv_b_proj.weight": Role(kind="matrix", head_blocks=(nope, module.v_head_dim) * heads, clip=keys),
    }
    if isinstance(getattr(module, "g_proj", None), nn.Linear):  # Kimi K3's output gate
        roles["g_proj.weight"] = Role(kind="matrix", head_blocks=(module.v_head_dim,) * heads)
    return roles


def _delta_roles(module: Any) -> dict[str, Role]:
    """What speaks to one head is cut by head; b_proj holds one gate a head and is no map between activations."""
    blocks = (module.head_dim,) * module.num_heads
    per_head = ("q_proj", "k_proj", "v_proj", "f_b_proj", "g_b_proj")
    roles = {
        f"{path}.weight": Role(kind="matrix", head_blocks=blocks)
        for path, part in module.named_modules()
        if path.rpartition(".")[2] in per_head and isinstance(part, nn.Linear)
    }
    return roles | {"b_proj.weight": Role(kind="vector")}


def _expert_roles(module: Any) -> dict[str, Role]:
    rows = module.gate_up_proj.shape[-2]
    return {"gate_up_proj": Role(kind="matrix", blocks=(rows // 2, rows // 2)), "down_proj": Role(kind="matrix")}


def _install_probe(model: Any) -> None:
    modeling = require("transformers.modeling_utils", "hf", "MuonClip on Hugging Face models")
    masking = require("transformers.masking_utils", "hf", "MuonClip on Hugging Face models")
    modeling.ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, probed_attention)
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(IMPLEMENTATION)


def probed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' SDPA attention; folds the step's largest logits into ``module.max_logits`` while asked to.

    query: [B, H, L, D], key: [B, G, L, D]; attention_mask: None (causal) or [B, 1, L, L].
    """
    if module.training and getattr(module, "record_max_logits", False):
        _observe(module, query.detach(), key.detach(), attention_mask, settings.get("scaling"))
    modeling = require("transformers.modeling_utils", "hf", "MuonClip on Hugging Face models")
    return modeling.ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **settings)


@torch.no_grad()
def _observe(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> None:
    batch, _, length, width = query.shape
    if key.shape[2] != length:
        raise TriScaleError("QK-Clip cannot measure logits over a cache; call the model with use_cache=False to train")
    maxima = max_logits(
        query.transpose(1, 2).flatten(0, 1),
        key.transpose(1, 2).flatten(0, 1),
        width**-0.5 if scaling is None else scaling,
        lengths=[length] * batch,
        causal=mask is None,
        mask=None if mask is None else mask[..., :length].expand(batch, -1, -1, -1),
    )
    fold(module.max_logits, maxima)
