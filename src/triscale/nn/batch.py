"""One description of a batch for training, prefill, decode and RL: flat tokens with sequence boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class TokenBatch:
    """N tokens of S sequences laid end to end; no padding exists.

    tokens [1, N] int64. cu_seqlens [S+1] int32: sequence s is ``tokens[0, cu[s]:cu[s+1]]``. lengths: the same on the
    host. context_lengths: tokens of each sequence already in the cache (0 in training). slots: each sequence's place
    in the cache. positions [N]: position inside the sequence, cached context included. targets [N] and loss_weights
    [N] fp32: the training objective, absent otherwise.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    positions: Tensor
    context_lengths: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    targets: Tensor | None = None
    loss_weights: Tensor | None = None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)  # per-batch tables shared by layers (rotary)

    @classmethod
    def from_lengths(
        cls,
        tokens: Tensor,
        lengths: Sequence[int],
        *,
        context_lengths: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
        targets: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> TokenBatch:
        """``tokens`` of any shape, read flat, cut into sequences of ``lengths`` (empty ones are allowed)."""
        lengths = tuple(int(n) for n in lengths)
        tokens = tokens.reshape(1, -1)
        if sum(lengths) != tokens.shape[1]:
            raise ValueError(f"lengths sum to {sum(lengths)}, but there are {tokens.shape[1]} tokens")
        context = tuple(context_lengths) if context_lengths is not None else (0,) * len(lengths)
        device = tokens.device
        cu = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        cu[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        pieces = [torch.arange(c, c + n) for c, n in zip(context, lengths, strict=True)]
        positions = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
        return cls(
            tokens=tokens,
            cu_seqlens=cu.to(device),
            lengths=lengths,
            positions=positions.to(device),
            context_lengths=context,
            slots=tuple(slots) if slots is not None else tuple(range(len(lengths))),
            targets=None if targets is None else targets.reshape(-1),
            loss_weights=None if loss_weights is None else loss_weights.reshape(-1),
        )

    @classmethod
    def from_rows(
        cls,
        tokens: Tensor,
        boundaries: Sequence[Sequence[int]] | None = None,
        targets: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> TokenBatch:
        """Rows [R, L] of packed documents; ``boundaries[r]`` are the offsets where documents start in row r."""
        rows, length = tokens.shape
        lengths: list[int] = []
        for row in range(rows):
            starts = sorted({0, *(boundaries[row] if boundaries is not None else ())})
            lengths += [b - a for a, b in zip(starts, [*starts[1:], length], strict=True)]
        return cls.from_lengths(tokens, lengths, targets=targets, loss_weights=loss_weights)

    @property
    def count(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def equal_rows(self) -> tuple[int, int] | None:
        """(S, L) if every sequence has the same length L, else None."""
        first = self.lengths[0] if self.lengths else 0
        return (len(self.lengths), first) if first and all(n == first for n in self.lengths) else None

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbouring sequences of equal length as (start token, sequences, length); empty sequences left out."""
        runs: list[tuple[int, int, int]] = []
        start = 0
        for length in self.lengths:
            if length:
                if runs and runs[-1][2] == length:
                    runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
                else:
                    runs.append((start, 1, length))
            start += length
        return runs

    def to(self, device: torch.device | str) -> TokenBatch:
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("tokens", "cu_seqlens", "positions", "targets", "loss_weights")
            if getattr(self, name) is not None
        }
        return replace(self, **moved, memo={})
