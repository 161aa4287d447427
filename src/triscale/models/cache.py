"""The cache of one decoder: per layer, the tensors its mixer's :class:`CacheSpec` asks for, by sequence slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triscale.nn.batch import TokenBatch
from triscale.nn.cache_spec import CacheSpec


class LayerCache:
    """Memory of one layer for a number of slots.

    Tensors that grow (keys, values, latents) live in buffers [slots, capacity, ...]; fixed ones (recurrent and
    convolution states) in [slots, ...]. Written tokens of slot s end at the batch's context length plus its new ones.
    """

    def __init__(self, spec: CacheSpec, slots: int, capacity: int, dtype: torch.dtype, device: torch.device | str):
        self.spec, self.capacity = spec, capacity
        self.lengths = [0] * slots
        make = lambda shape, kind: torch.zeros(shape, dtype=kind or dtype, device=device)
        self.grown = {n: make((slots, capacity, *shape), kind) for n, (shape, kind) in spec.per_token.items()}
        self.fixed = {n: make((slots, *shape), kind) for n, (shape, kind) in spec.per_sequence.items()}
        self._batch: TokenBatch | None = None

    @property
    def can_trim(self) -> bool:
        """Whether a slot can be cut back to fewer tokens: true only without recurrent states."""
        return not self.fixed

    def append(self, batch: TokenBatch, **values: Tensor) -> None:
        """Write the new tokens [N, *shape] of every sequence behind its context."""
        self._batch = batch
        start = 0
        for slot, context, length in zip(batch.slots, batch.context_lengths, batch.lengths, strict=True):
            if context + length > self.capacity:
                raise ValueError(f"cache slot {slot} holds {self.capacity} tokens, {context + length} are needed")
            for name, value in values.items():
                self.grown[name][slot, context : context + length] = value[start : start + length]
            self.lengths[slot] = context + length
            start += length

    def read(self, name: str, index: int) -> Tensor:
        """Context and new tokens [C, *shape] of the batch's sequence ``index``, as a view."""
        assert self._batch is not None, "read() before append()"
        slot = self._batch.slots[index]
        return self.grown[name][slot, : self.lengths[slot]]

    def state(self, batch: TokenBatch, name: str) -> Tensor:
        """States [S, *shape] of the batch's sequences; zeros where a sequence starts."""
        states = self.fixed[name][list(batch.slots)]
        fresh = [i for i, context in enumerate(batch.context_lengths) if context == 0]
        if fresh:
            states[fresh] = 0
        return states

    def set_state(self, batch: TokenBatch, **values: Tensor) -> None:
        for name, value in values.items():
            self.fixed[name][list(batch.slots)] = value.to(self.fixed[name].dtype)

    def trim(self, slot: int, length: int) -> None:
        if not self.can_trim:
            raise ValueError("a layer with a recurrent state cannot be trimmed; restore a snapshot instead")
        self.lengths[slot] = min(self.lengths[slot], length)

    def snapshot(self, slot: int) -> dict[str, Tensor]:
        """A copy of everything slot holds: restore() brings it back exactly."""
        grown = {name: value[slot, : self.lengths[slot]].clone() for name, value in self.grown.items()}
        return grown | {name: value[slot].clone() for name, value in self.fixed.items()}

    def restore(self, slot: int, saved: dict[str, Tensor], length: int) -> None:
        for name, value in saved.items():
            if name in self.grown:
                self.grown[name][slot, :length] = value[:length]
            else:
                self.fixed[name][slot] = value
        self.lengths[slot] = length


@dataclass
class DecoderCache:
    """The layers' caches together; ``batch()`` describes new tokens of the slots with their current contexts."""

    layers: list[LayerCache]
    context: list[int]

    def batch(self, tokens: list[list[int]], slots: list[int], device: torch.device | str = "cpu") -> TokenBatch:
        flat = torch.tensor([t for sequence in tokens for t in sequence], dtype=torch.int64, device=device)
        lengths = [len(sequence) for sequence in tokens]
        return TokenBatch.from_lengths(flat, lengths, context_lengths=[self.context[s] for s in slots], slots=slots)

    def advance(self, batch: TokenBatch) -> None:
        """Count the batch's tokens as cached; call it after the forward pass that wrote them."""
        for slot, context, length in zip(batch.slots, batch.context_lengths, batch.lengths, strict=True):
            self.context[slot] = context + length

    def copy(self, source: int, target: int) -> None:
        for layer in self.layers:
            layer.restore(target, layer.snapshot(source), layer.lengths[source])
        self.context[target] = self.context[source]
