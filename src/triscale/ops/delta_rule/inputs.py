"""Checks and normal form of the operator's arguments, shared by every path.

Legend: B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K key width, V value width,
N packed sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from triscale.config import TriScaleError

CuSeqlens = Tensor | Sequence[int] | None


class Inputs(NamedTuple):
    """All heads are value heads; every field has the accumulation dtype's meaning but keeps its own dtype."""

    q: Tensor  # [B, T, HV, K]
    k: Tensor  # [B, T, HV, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K] log decay
    beta: Tensor  # [B, T, HV]
    scale: float
    initial_state: Tensor | None  # [B or N, HV, K, V]
    offsets: tuple[int, ...] | None  # cumulative lengths of packed sequences (only with B = 1)

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.offsets is None else len(self.offsets) - 1

    @property
    def dtype(self) -> torch.dtype:
        """fp32 for gates, state and sums; fp64 as soon as any input is fp64."""
        return accumulation_dtype(self.q, self.k, self.v, self.g)


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _refuse(field: str, value: object, fix: str) -> TriScaleError:
    return TriScaleError(f"gated_delta_rule: {field} is {value}. {fix}")


def offsets_of(cu_seqlens: CuSeqlens, batch: int, tokens: int) -> tuple[int, ...] | None:
    """Cumulative lengths as host integers; raises :class:`TriScaleError` unless they run from 0 to ``tokens``."""
    if cu_seqlens is None:
        return None
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    offsets = tuple(int(x) for x in values)
    if batch != 1:
        raise _refuse("the batch size", batch, "With cu_seqlens all sequences lie in one row: use B = 1")
    rising = all(a <= b for a, b in itertools.pairwise(offsets))
    if not offsets or offsets[0] != 0 or offsets[-1] != tokens or not rising:
        shown = str(values if len(values) < 12 else [*values[:4], "...", *values[-3:]])
        raise _refuse("cu_seqlens", shown, f"It must start at 0, never fall, and end at T = {tokens}")
    return offsets


def normalise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: CuSeqlens,
) -> Inputs:
    """Check shapes, repeat query/key heads for grouped value heads and broadcast a scalar decay over K."""
    if q.dim() != 4 or q.shape != k.shape:
        raise _refuse("the shape of q and k", f"{tuple(q.shape)} and {tuple(k.shape)}", "Both must be [B, T, H, K]")
    batch, tokens, heads, key_width = q.shape
    if v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        raise _refuse("the shape of v", tuple(v.shape), f"It must be [{batch}, {tokens}, HV, V]")
    value_heads = v.shape[2]
    if value_heads % heads:
        raise _refuse("the number of value heads", value_heads, f"It must be a multiple of the {heads} query/key heads")
    if g.shape not in ((batch, tokens, value_heads, key_width), (batch, tokens, value_heads)):
        fix = f"It must be [{batch}, {tokens}, {value_heads}, {key_width}], or without the last axis for a scalar decay"
        raise _refuse("the shape of g", tuple(g.shape), fix)
    if beta.shape != (batch, tokens, value_heads):
        raise _refuse("the shape of beta", tuple(beta.shape), f"It must be [{batch}, {tokens}, {value_heads}]")
    offsets = offsets_of(cu_seqlens, batch, tokens)
    sequences = batch if offsets is None else len(offsets) - 1
    expected = (sequences, value_heads, key_width, v.shape[3])
    if initial_state is not None and tuple(initial_state.shape) != expected:
        fix = f"It must be {expected}: [sequences, value heads, K, V], keys before values"
        raise _refuse("the shape of initial_state", tuple(initial_state.shape), fix)
    if value_heads != heads:
        q, k = (x.repeat_interleave(value_heads // heads, dim=2) for x in (q, k))
    if g.dim() == 3:
        g = g.unsqueeze(-1).expand(-1, -1, -1, key_width)
    return Inputs(q, k, v, g, beta, key_width**-0.5 if scale is None else float(scale), initial_state, offsets)
