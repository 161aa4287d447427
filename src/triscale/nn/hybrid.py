"""The hybrid layout (Kimi Linear, arXiv 2510.26692, section 4): a few linear layers, then one full-attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from triscale.config import part

from .context import BuildContext
from .parts import MIXERS


class Hybrid:
    """Chooses, layer by layer, one of two mixers; it adds nothing of its own to the model."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """pattern "3:1" = three linear layers, then one full; the last layer of the model is always full.

        full_layers: the full layers (from 0) themselves, instead of the pattern, for published layouts unlike it.
        """

        pattern: str = "3:1"
        full_layers: tuple[int, ...] = ()
        linear: Any = part(MIXERS, "delta_attention")
        full: Any = part(MIXERS, "latent_attention")

        def __post_init__(self) -> None:
            self.counts  # noqa: B018 - validates

        @property
        def counts(self) -> tuple[int, int]:
            linear, colon, full = self.pattern.partition(":")
            if not (colon and linear.isdigit() and full.isdigit() and int(linear) + int(full) > 0):
                raise ValueError(f"pattern: {self.pattern!r} is not LINEAR:FULL; write for example '3:1'")
            return int(linear), int(full)

        def is_full(self, layer: int, depth: int) -> bool:
            if self.full_layers:
                return layer in self.full_layers
            linear, full = self.counts
            return (full > 0 and layer == depth - 1) or layer % (linear + full) >= linear

        def build(self, context: BuildContext) -> nn.Module:
            if self.full_layers and not 0 <= min(self.full_layers) <= max(self.full_layers) < context.depth:
                raise ValueError(f"full_layers: {self.full_layers} must be layers 0 to {context.depth - 1}")
            chosen = self.full if self.is_full(context.layer, context.depth) else self.linear
            return chosen.build(context)
