"""The largest attention logit of every head, exact, without a T x T matrix.

Legend: S sequences, L length, H query heads, G key heads (H = G * group), D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 256
WORKSPACE = 1 << 24  # logits held at once


@torch.no_grad()
def max_logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    lengths: Sequence[int] | None = None,
    causal: bool = True,
    mask: Tensor | None = None,
    block: int = BLOCK,
) -> Tensor:
    """Per query head, the maximum over valid pairs of ``scale * <q_i, k_j>``, fp32 (fp64 for fp64 inputs), shape [H].

    q: [N, H, D], flat tokens of several sequences; k: [N, G, D] with G dividing H (query head h reads key head
    h // (H / G)). lengths: tokens per sequence, None = one sequence; pairs never cross sequences, and with ``causal``
    only j <= i counts. mask: [S, 1 or H, L, L] for equal lengths, boolean (True = valid) or additive (-inf = invalid);
    finite additive terms do not enter the maximum, which is that of the bare logits. A head without a valid pair gets
    -inf. Logits are computed in blocks of ``block`` queries, so memory grows with L, not with L squared.
    """
    if scale < 0:
        raise ValueError(f"scale {scale} is negative: the maximum would become a minimum")
    total, heads = q.shape[:2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    best = torch.full((heads,), -torch.inf, dtype=dtype, device=q.device)
    lengths = [total] if lengths is None else [n for n in lengths if n > 0]
    if not lengths or total == 0:
        return best
    if sum(lengths) != total:
        raise ValueError(f"lengths sum to {sum(lengths)}, but q has {total} tokens")
    if mask is not None and mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    for start, count, length in _runs(lengths):
        rows = slice(start, start + count * length)
        best = torch.maximum(best, _equal(q[rows], k[rows], count, length, dtype, causal, mask, block))
    return best * scale if scale != 0 else torch.where(best > -torch.inf, 0.0, best)


def fold(buffer: Tensor, maxima: Tensor) -> None:
    """Raise ``buffer`` [heads] to ``maxima``, in place: its address must survive for readers. NaN is kept, so that nobody
    clips by it."""
    buffer.copy_(torch.maximum(buffer, maxima.to(buffer)))


def _runs(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first token, sequences, length) of every run of equally long neighbours, which one product can serve."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for length in lengths:
        if runs and runs[-1][2] == length:
            first, count, _ = runs[-1]
            runs[-1] = (first, count + 1, length)
        else:
            runs.append((start, 1, length))
        start += length
    return runs


def _equal(
    q: Tensor, k: Tensor, count: int, length: int, dtype: torch.dtype, causal: bool, mask: Tensor | None, block: int
) -> Tensor:
    """Maxima [H] over ``count`` sequences of one ``length``: q [count * length, H, D]."""
    heads, width, key_heads = q.shape[1], q.shape[2], k.shape[1]
    group = heads // key_heads
    # [S, G, group, L, D] and [S, G, 1, L, D]: the group shares its keys without copying them per query head
    q = q.reshape(count, length, key_heads, group, width).permute(0, 2, 3, 1, 4).to(dtype)
    k = k.reshape(count, length, key_heads, width).permute(0, 2, 1, 3).to(dtype)
    best = torch.full((key_heads, group), -torch.inf, dtype=dtype, device=q.device)
    per_pass = max(1, WORKSPACE // max(1, heads * min(block, length) * length))
    for first in range(0, count, per_pass):
        rows = slice(first, first + per_pass)
        for start in range(0, length, block):
            stop = min(start + block, length)
            until = stop if causal else length
            queries = q[rows, :, :, start:stop].flatten(2, 3)
            logits = (queries @ k[rows, :, :until].mT).unflatten(2, (group, stop - start))
            valid = None
            if causal:
                valid = torch.ones(stop - start, until, dtype=torch.bool, device=q.device).tril(start)
            if mask is not None:
                part = mask[rows, :, start:stop, :until]
                part = part.expand(-1, heads, -1, -1).unflatten(1, (key_heads, group))
                valid = part if valid is None else part & valid
            if valid is not None:
                logits = logits.masked_fill_(~valid, -torch.inf)
            best = torch.maximum(best, logits.amax(dim=(0, 3, 4)))
    return best.flatten()
