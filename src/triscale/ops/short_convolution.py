"""Causal depthwise convolution with a short kernel over packed sequences.

    y_t = sum_j weight[:, j] * x_{t - (W - 1) + j}

where x before a sequence's first token is its state (zeros for a fresh one). Written as W shifted multiply-adds on the
token-major layout: no transposition, and every sequence is preceded by its W - 1 state rows, so boundaries, sequences
shorter than the kernel and empty ones need no special case.

Legend: S sequences, N tokens of all of them, C channels, W kernel width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from triscale.config import TriScaleError


def causal_short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [B, T, C] (or [1, N, C] with ``cu_seqlens``), weight [C, W] -> (y like x, state [B or S, W - 1, C] or None).

    The state is the last W - 1 inputs of each sequence, oldest first. Raises :class:`TriScaleError` for other shapes.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise TriScaleError(
            f"causal_short_convolution: x is {tuple(x.shape)} and weight {tuple(weight.shape)}. "
            "They must be [B, T, C] and [C, W]"
        )
    rows, history = x, weight.shape[1] - 1
    lengths = None
    if cu_seqlens is not None:
        offsets = tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
        lengths = tuple(b - a for a, b in pairwise(offsets))
        if len(set(lengths)) == 1 and lengths[0]:
            rows, lengths = x.view(len(lengths), lengths[0], -1), None
    sequences = rows.shape[0] if lengths is None else len(lengths)
    if initial_state is None:
        state = x.new_zeros(sequences, history, x.shape[2])
    elif tuple(initial_state.shape) == (sequences, history, x.shape[2]):
        state = initial_state.to(x.dtype)
    else:
        raise TriScaleError(
            f"causal_short_convolution: initial_state is {tuple(initial_state.shape)}. "
            f"It must be {(sequences, history, x.shape[2])}: [sequences, W - 1, C]"
        )
    if lengths is None:
        padded = torch.cat([state, rows], dim=1)  # [S, W - 1 + L, C]
        y = _ShiftedSum.apply(padded, weight).reshape(x.shape)
        final = padded[:, padded.shape[1] - history :]
    else:
        tokens, states, last = _places(lengths, history, x.device)
        padded = x.new_zeros(1, len(tokens) + states.numel(), x.shape[2])
        padded = padded.index_copy(1, tokens, x).index_copy(1, states, state.reshape(1, -1, x.shape[2]))
        y = _ShiftedSum.apply(padded, weight).index_select(1, tokens - history)
        final = padded[0, last].view(sequences, history, x.shape[2])
    return y, final if output_final_state else None


@lru_cache(maxsize=32)
def _places(lengths: tuple[int, ...], history: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the tokens [N], of the states [S * (W - 1)] and of the final states in the padded layout."""
    tokens, states, last, start = [], [], [], 0
    for length in lengths:
        states.append(torch.arange(start, start + history))
        tokens.append(torch.arange(start + history, start + history + length))
        last.append(torch.arange(start + length, start + length + history))
        start += history + length
    empty = [torch.zeros(0, dtype=torch.long)]
    return tuple(torch.cat(piece or empty).to(device) for piece in (tokens, states, last))  # type: ignore[return-value]


class _ShiftedSum(torch.autograd.Function):
    """padded [S, W - 1 + L, C], weight [C, W] -> [S, L, C]; sums in at least fp32."""

    @staticmethod
    def forward(ctx, padded: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(padded, weight)
        taps = weight.shape[1]
        length = padded.shape[1] - taps + 1
        x, w = _accumulated(padded), _accumulated(weight).to(_accumulated(padded).dtype)
        y = x[:, :length] * w[:, 0]
        for j in range(1, taps):
            y.addcmul_(x[:, j : j + length], w[:, j])
        return y.to(padded.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        padded, weight = ctx.saved_tensors
        taps, length = weight.shape[1], dy.shape[1]
        x, w, d = _accumulated(padded), _accumulated(weight), _accumulated(dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.zeros_like(x)
            for j in range(taps):
                dx[:, j : j + length].addcmul_(d, w[:, j].to(d.dtype))
            dx = dx.to(padded.dtype)
        if ctx.needs_input_grad[1]:
            dw = torch.stack([(d * x[:, j : j + length]).sum((0, 1)) for j in range(taps)], dim=1).to(weight.dtype)
        return dx, dw


def _accumulated(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
