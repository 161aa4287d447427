"""Gated feed-forward layer with the bounded SiTU activation (Kimi K3 report, section 2.3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triscale.ops.gated_activation import SituGLUActivation, gated

from .batch import TokenBatch
from .context import BuildContext
from .feed_forward import SwiGLU, default_hidden


class SituGLU(SwiGLU):
    """``down(beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta))``, g = gate(x), u = up(x).

    The inner activation never exceeds beta * linear_beta, and equals SwiGLU's for small inputs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """hidden: inner width; None = 8/3 of the model's width rounded up to a multiple of 16."""

        hidden: int | None = None
        beta: float = 4.0
        linear_beta: float = 25.0

        def __post_init__(self) -> None:
            if self.hidden is not None and self.hidden < 1:
                raise ValueError(f"hidden: {self.hidden} must be at least 1")
            if self.beta <= 0 or self.linear_beta <= 0:
                raise ValueError(f"beta: {self.beta} and linear_beta: {self.linear_beta} must be positive")

        def build(self, context: BuildContext) -> SituGLU:
            activation = SituGLUActivation(self.beta, self.linear_beta)
            return SituGLU(context.width, self.hidden or default_hidden(context.width), context, activation)

    def __init__(self, width: int, hidden: int, context: BuildContext, activation: SituGLUActivation):
        super().__init__(width, hidden, context)
        self.activation = activation

    def forward(self, x: Tensor, batch: TokenBatch | None = None) -> Tensor:
        return self.down_proj(gated(self.activation, self.gate_proj(x), self.up_proj(x)))
