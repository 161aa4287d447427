"""A long short-term memory layer (Hochreiter and Schmidhuber 1997) as a mixer: the memory studies' comparison arm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from triscale.config import Role

from .batch import TokenBatch
from .cache_spec import CacheSpec
from .context import BuildContext


class LSTM(nn.Module):
    """One LSTM layer and an output projection; [1, N, width] -> [1, N, width], sequences independent."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """state: width of the hidden and the cell state; None = the model's width."""

        state: int | None = None

        def __post_init__(self) -> None:
            if self.state is not None and self.state < 1:
                raise ValueError(f"state: {self.state} must be at least 1")

        def build(self, context: BuildContext) -> LSTM:
            return LSTM(self, context)

    def __init__(self, config: Config, context: BuildContext):
        super().__init__()
        self.width, self.state_width = context.width, config.state or context.width
        self.recurrence = nn.LSTM(self.width, self.state_width, batch_first=True, **context.factory)
        self.o_proj = nn.Linear(self.state_width, self.width, bias=False, **context.factory)

    def forward(self, x: Tensor, batch: TokenBatch, cache=None) -> Tensor:
        initial = None
        if cache is not None:
            initial = tuple(cache.state(batch, name).to(x.dtype)[None] for name in ("hidden", "cell"))
        if batch.equal_rows is not None:
            y, (hidden, cell) = self.recurrence(x.view(*batch.equal_rows, self.width), initial)
            y = y.reshape(1, -1, self.state_width)
        else:
            y, hidden, cell = self._ragged(x, batch, initial)
        if cache is not None:
            cache.set_state(batch, hidden=hidden[0], cell=cell[0])
        return self.o_proj(y)

    def _ragged(self, x: Tensor, batch: TokenBatch, initial) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences of different lengths; empty ones keep their state."""
        if initial is None:
            zeros = x.new_zeros(1, len(batch.lengths), self.state_width)
            initial = (zeros, zeros)
        index = torch.tensor([i for i, n in enumerate(batch.lengths) if n], device=x.device, dtype=torch.long)
        if not len(index):
            return x.new_zeros(1, 0, self.state_width), *initial
        pieces = [piece for piece in x[0].split(list(batch.lengths)) if len(piece)]
        lengths = torch.tensor([len(piece) for piece in pieces])
        packed = pack_padded_sequence(pad_sequence(pieces, batch_first=True), lengths, True, enforce_sorted=False)
        out, states = self.recurrence(packed, tuple(s[:, index].contiguous() for s in initial))
        padded, _ = pad_packed_sequence(out, batch_first=True)
        y = torch.cat([padded[i, : len(piece)] for i, piece in enumerate(pieces)])[None]
        hidden, cell = (old.index_copy(1, index, new) for old, new in zip(initial, states, strict=True))
        return y, hidden, cell

    def cache_spec(self) -> CacheSpec:
        shape = ((self.state_width,), torch.float32)
        return CacheSpec(per_sequence={"hidden": shape, "cell": shape})

    def parameter_roles(self) -> dict[str, Role]:
        """The four gates of a fused weight are separate matrices; the forget gate's bias starts at 1."""
        fused = Role(kind="matrix", blocks=(self.state_width,) * 4, initial="custom")
        bias = Role(kind="bias", decay=False, initial="custom")
        return {
            "recurrence.weight_ih_l0": fused,
            "recurrence.weight_hh_l0": fused,
            "recurrence.bias_ih_l0": bias,
            "recurrence.bias_hh_l0": bias,
            "o_proj.weight": Role(kind="matrix"),
        }

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Weights uniform within 1/sqrt(state) (torch's own), biases zero but for the forget gate."""
        if len(shape) == 2:
            bound = self.state_width**-0.5
            return torch.rand(shape, generator=generator, dtype=torch.float32) * 2 * bound - bound
        value = torch.zeros(shape, dtype=torch.float32)
        if name.endswith("bias_ih_l0"):
            value[self.state_width : 2 * self.state_width] = 1.0
        return value

    def flops_per_token(self, context_length: int) -> int:
        return 2 * sum(p.numel() for p in self.parameters() if p.ndim == 2)
