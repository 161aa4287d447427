"""Causal softmax attention over packed sequences, on top of torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def segmented_attention(q: Tensor, k: Tensor, v: Tensor, batch, scale: float | None = None) -> Tensor:
    """Causal attention inside each sequence of a packed batch, never across a boundary.

    q [1, N, H, K], k [1, N, G, K], v [1, N, G, V] with H a multiple of G (query heads share keys in groups).
    ``batch.runs`` lists neighbouring sequences of equal length, each run being one batched call, so nothing is masked
    that need not be computed. scale defaults to K**-0.5. Returns [1, N, H, V].
    """
    q, k, v, v_dim, scale = _common_head_dim(q, k, v, scale)
    outputs = []
    for start, count, length in batch.runs:
        piece = slice(start, start + count * length)
        rows = [t[:, piece].reshape(count, length, *t.shape[2:]).transpose(1, 2) for t in (q, k, v)]
        o = F.scaled_dot_product_attention(*_expand(*rows), is_causal=True, scale=scale)
        outputs.append(o.transpose(1, 2).reshape(1, count * length, *o.shape[1::2]))
    if not outputs:
        return q.new_zeros(1, 0, q.shape[2], v_dim)
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return joined[..., :v_dim]


def cached_attention(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int], scale: float | None = None
) -> Tensor:
    """Attention of new tokens to their cached context and themselves.

    q [1, N, H, K] holds ``lengths[s]`` new tokens of each sequence; keys[s] [C_s + lengths[s], G, K] and values[s] end
    with the new tokens. Returns [1, N, H, V].
    """
    outputs, start = [], 0
    for key, value, length in zip(keys, values, lengths, strict=True):
        new, key, value, v_dim, used_scale = _common_head_dim(
            q[:, start : start + length], key[None], value[None], scale
        )
        a, b, c = _expand(new.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        mask = None
        if length > 1:
            ones = torch.ones(length, key.shape[1], dtype=torch.bool, device=q.device)
            mask = ones.tril(key.shape[1] - length)
        o = F.scaled_dot_product_attention(a, b, c, attn_mask=mask, scale=used_scale)
        outputs.append(o.transpose(1, 2)[..., :v_dim])
        start += length
    return torch.cat(outputs, dim=1)


def _common_head_dim(q: Tensor, k: Tensor, v: Tensor, scale: float | None):
    """Pad values (or queries and keys) with zeros to one head dimension: only then is the fused CPU kernel taken."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k_dim, v_dim = q.shape[-1], v.shape[-1]
    if v_dim < k_dim:
        v = F.pad(v, (0, k_dim - v_dim))
    elif v_dim > k_dim:
        q, k = F.pad(q, (0, v_dim - k_dim)), F.pad(k, (0, v_dim - k_dim))
    return q, k, v, v_dim, scale


def _expand(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat shared key and value heads [B, G, T, D] to the number of query heads."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return q, k, v
