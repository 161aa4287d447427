"""What a part is told about where it sits when its config builds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """width: hidden size. layer: decoder layer, from 0. depth: number of decoder layers."""

    width: int
    layer: int = 0
    depth: int = 1
    norm_eps: float = 1e-5
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    @property
    def factory(self) -> dict:
        """Keyword arguments for tensor and module constructors."""
        return {"dtype": self.dtype, "device": self.device}

    def at(self, layer: int) -> BuildContext:
        return replace(self, layer=layer)
