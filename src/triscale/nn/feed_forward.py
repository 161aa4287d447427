"""Gated feed-forward layer (Shazeer 2020, "GLU Variants Improve Transformer")."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from triscale.config import Role

from .batch import TokenBatch
from .context import BuildContext


def default_hidden(width: int) -> int:
    """8/3 of the width, rounded up to a multiple of 16: as many parameters as a plain layer four times as wide."""
    return -(-8 * width // 3 // 16) * 16


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` on x [..., width]."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """hidden: inner width; None = 8/3 of the model's width rounded up to a multiple of 16."""

        hidden: int | None = None

        def __post_init__(self) -> None:
            if self.hidden is not None and self.hidden < 1:
                raise ValueError(f"hidden: {self.hidden} must be at least 1")

        def build(self, context: BuildContext) -> SwiGLU:
            return SwiGLU(context.width, self.hidden or default_hidden(context.width), context)

    def __init__(self, width: int, hidden: int, context: BuildContext):
        super().__init__()
        self.width, self.hidden = width, hidden
        self.gate_proj = nn.Linear(width, hidden, bias=False, **context.factory)
        self.up_proj = nn.Linear(width, hidden, bias=False, **context.factory)
        self.down_proj = nn.Linear(hidden, width, bias=False, **context.factory)

    def forward(self, x: Tensor, batch: TokenBatch | None = None) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def parameter_roles(self) -> dict[str, Role]:
        return {f"{name}.weight": Role(kind="matrix") for name in ("gate_proj", "up_proj", "down_proj")}

    def flops_per_token(self) -> int:
        return 2 * 3 * self.width * self.hidden
