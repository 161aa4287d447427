"""What a mixer must remember between calls, stated in shapes so that cache and planner never look inside a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

Entry = tuple[tuple[int, ...], torch.dtype | None]


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """per_token: tensors that grow with the context (keys, values, latents). per_sequence: tensors of fixed size
    (recurrent and convolution states). Each entry is (shape, dtype); dtype None means the model's."""

    per_token: dict[str, Entry] = field(default_factory=dict)
    per_sequence: dict[str, Entry] = field(default_factory=dict)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return _size(self.per_token, dtype)

    def bytes_fixed(self, dtype: torch.dtype) -> int:
        return _size(self.per_sequence, dtype)


def _size(entries: dict[str, Entry], dtype: torch.dtype) -> int:
    return sum(math.prod(shape) * (kind or dtype).itemsize for shape, kind in entries.values())
