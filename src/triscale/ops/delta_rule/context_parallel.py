"""Context parallelism: the tokens of one packed row spread over ranks, every rank holding a contiguous part.

Each rank sends one affine map of fixed size (:mod:`.segments`) for the document that leaves it on the right; one
all-gather, then every rank folds the maps of the ranks to its left that belong to the document entering it. Documents
may cross any number of ranks. The short convolution needs the last inputs of the rank to the left (:func:`exchange_halo`).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from triscale.config import TriScaleError

from .dispatch import gated_delta_rule
from .inputs import CuSeqlens, offsets_of
from .segments import SegmentMap, segment_map


class Share(NamedTuple):
    """The part of a packed row that a rank holds."""

    offsets: tuple[int, ...]  # cumulative lengths of the local pieces of documents
    carried: int  # tokens of the first piece's document that lie on ranks to the left
    open_end: bool  # whether the last piece's document goes on to the right


def share_of(offsets: tuple[int, ...], start: int, stop: int) -> Share:
    """Cut documents with global cumulative lengths ``offsets`` to the tokens [start, stop)."""
    inner = sorted({x for x in offsets if start < x < stop})
    local = (0, *(x - start for x in inner), stop - start) if stop > start else (0,)
    document = offsets[bisect_right(offsets, start) - 1]
    return Share(local, start - document, stop not in offsets)


def context_parallel_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    group: Any = None,
    cu_seqlens: CuSeqlens = None,
    scale: float | None = None,
    chunk_size: int = 64,
) -> Tensor:
    """This rank's part [1, T_local, HV, V] of the rule over all ranks' tokens, in rank order; differentiable.

    Shapes as in :func:`triscale.ops.gated_delta_rule` with B = 1. ``cu_seqlens``: cumulative lengths of the documents
    in the *whole* row, the same on every rank (None = one document). Every rank needs at least one token. Outputs and
    gradients equal those of a single process on the whole row; every rank must run the backward pass.
    """
    start, total = place(q.shape[1], group, q.device)
    stop = start + q.shape[1]
    offsets = offsets_of(cu_seqlens, 1, total) or (0, total)
    share = share_of(offsets, start, stop)
    begin = share.offsets[-2]
    last = segment_map(*(x[:, begin:] for x in (k, v, g, beta)), chunk_size=chunk_size)
    through = len(share.offsets) == 2 and share.carried > 0  # the same document enters and leaves
    transition = last.transition if through else torch.zeros_like(last.transition)
    maps = gather(torch.cat([transition, last.state], dim=-1), group)
    width = k.shape[-1]
    state = torch.zeros_like(last.state)
    for piece in maps[: dist.get_rank(group)]:
        state = SegmentMap(piece[..., :width], piece[..., width:]).apply(state)
    # every rank takes part in the backward collective, whether or not a state entered it
    entering = (state if share.carried else state * 0) + 0 * maps[0].sum()
    rest = state.new_zeros(len(share.offsets) - 2, *state.shape[1:])
    out, _ = gated_delta_rule(
        q, k, v, g, beta, scale=scale, cu_seqlens=share.offsets, initial_state=torch.cat([entering, rest]),
        chunk_size=chunk_size,
    )  # fmt: skip
    return out


def exchange_halo(x: Tensor, history: int, *, group: Any = None, cu_seqlens: CuSeqlens = None) -> tuple[Tensor, Share]:
    """Initial states [pieces, history, C] of this rank's pieces for the short convolution, and the rank's share.

    x: this rank's inputs [1, T_local, C]. Every rank needs at least ``history`` tokens (:class:`TriScaleError`).
    """
    if x.shape[1] < max(history, 1):
        raise TriScaleError(
            f"exchange_halo: a rank holds {x.shape[1]} tokens, but the halo is {history}. Use fewer ranks"
        )
    start, total = place(x.shape[1], group, x.device)
    share = share_of(offsets_of(cu_seqlens, 1, total) or (0, total), start, start + x.shape[1])
    tails = gather(x[:, x.shape[1] - history :], group)
    rank, known = dist.get_rank(group), min(share.carried, history)
    states = x.new_zeros(len(share.offsets) - 1, history, x.shape[2])
    if not known or not rank:
        return states + 0 * tails[0].sum(), share
    first = torch.cat([x.new_zeros(1, history - known, x.shape[2]), tails[rank - 1][:, history - known :]], dim=1)
    return torch.cat([first, states[1:]]), share


def place(tokens: int, group: Any, device: torch.device) -> tuple[int, int]:
    """(position of this rank's first token in the row, tokens of the whole row)."""
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([tokens], device=device), group=group)
    sizes = [int(c) for c in counts]
    if not min(sizes):
        raise TriScaleError(f"context parallel: ranks hold {sizes} tokens. Every rank needs at least one")
    return sum(sizes[: dist.get_rank(group)]), sum(sizes)


def gather(x: Tensor, group: Any = None) -> list[Tensor]:
    """Every rank's ``x`` (same shape everywhere); the gradient of a rank's own part is summed over all ranks."""
    return list(_Gather.apply(x, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        total = torch.stack(grads)  # absent gradients arrive as zeros
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
