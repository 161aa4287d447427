"""Segments of one sequence as affine maps of the state, composed exactly.

A segment turns the state S that enters it into M S + Z, with the transition M = prod (I - beta k k^T) Diag(exp(g))
[K, K] and the state Z [K, V] it reaches from zero. Maps compose: (M2, Z2) after (M1, Z1) is (M2 M1, M2 Z1 + Z2). Adding
zero-start states alone, as for plain linear attention, is wrong for the delta rule (Kimi K3, arXiv 2607.24653, 5.1.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from triscale.config import TriScaleError

from .dispatch import gated_delta_rule


class SegmentMap(NamedTuple):
    """What a segment does to the state: S -> transition @ S + state."""

    transition: Tensor  # [B, HV, K, K]
    state: Tensor  # [B, HV, K, V]

    def apply(self, state: Tensor) -> Tensor:
        return self.transition @ state + self.state

    def then(self, later: SegmentMap) -> SegmentMap:
        """This segment followed by ``later``."""
        return SegmentMap(later.transition @ self.transition, later.apply(self.state))


def segment_map(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, chunk_size: int = 64) -> SegmentMap:
    """The map of the segment [B, T, ...] (shapes as in :func:`triscale.ops.gated_delta_rule`); differentiable.

    Both parts come from one pass: with zero values the rule maps the identity to its transition, so values [v | 0]
    with the initial state [0 | I] leave [Z | M].
    """
    batch, tokens, _, width = k.shape
    value_heads, value_width = v.shape[2:]
    dtype = torch.float64 if torch.float64 in (k.dtype, v.dtype, g.dtype) else torch.float32
    values = torch.cat([v, v.new_zeros(batch, tokens, value_heads, width)], dim=-1)
    identity = torch.eye(width, dtype=dtype, device=v.device).expand(batch, value_heads, width, width)
    start = torch.cat([identity.new_zeros(batch, value_heads, width, value_width), identity], dim=-1)
    _, final = gated_delta_rule(
        torch.zeros_like(k), k, values, g, beta, initial_state=start, output_final_state=True, chunk_size=chunk_size
    )
    assert final is not None
    state, transition = final.split((value_width, width), dim=-1)
    return SegmentMap(transition, state)


def gated_delta_rule_by_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: int,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """:func:`triscale.ops.gated_delta_rule` for one sequence [1, T, ...], its ``segments`` worked on side by side.

    Costs up to twice the arithmetic and shortens the sequential scan by the number of segments: for long prefills with
    few heads on a wide device. T must be a multiple of ``segments``.
    """
    tokens = q.shape[1]
    if q.shape[0] != 1 or segments < 1 or tokens % segments:
        raise TriScaleError(
            f"gated_delta_rule_by_segments: q is {tuple(q.shape)} and segments is {segments}. "
            "It takes one sequence (B = 1) whose length is a multiple of segments"
        )
    rows = [x.reshape(segments, tokens // segments, *x.shape[2:]) for x in (q, k, v, g, beta)]
    maps = segment_map(*rows[1:], chunk_size=chunk_size)
    state = torch.zeros_like(maps.state[:1]) if initial_state is None else initial_state.to(maps.state.dtype)
    entering = []
    for index in range(segments):
        entering.append(state)
        state = SegmentMap(maps.transition[index : index + 1], maps.state[index : index + 1]).apply(state)
    out, _ = gated_delta_rule(*rows, scale=scale, initial_state=torch.cat(entering), chunk_size=chunk_size)
    return out.reshape(v.shape), state if output_final_state else None
