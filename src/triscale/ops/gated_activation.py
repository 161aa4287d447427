"""Gated activations ``f(gate) * g(up)`` with backward passes written by hand: only gate and up are kept.

SwiGLU (Shazeer 2020): ``silu(gate) * up``.
SiTU-GLU (Kimi K3 report, section 2.3.2 and appendix B)::

    [b1 tanh(gate / b1) sigmoid(gate)] * [b2 tanh(up / b2)]          b1 = beta = 4, b2 = linear_beta = 25

equal to SwiGLU to first order at the origin and bounded by b1 * b2, with gradients that fade instead of being cut.
It is computed in fp32 and cast back, as in K3. Gradients of both are exact to the working precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class GatedActivation(Protocol):
    def value(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation; the definition."""

    def backward(self, gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """value, d gate and d up for the gradient of the value; all new tensors."""


@dataclass(frozen=True)
class SwiGLUActivation:
    def value(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).mul_(up)

    def backward(self, gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        # d silu = sigmoid + silu (1 - sigmoid) = sigmoid - silu sigmoid + silu
        slope = sigmoid.sub_(silu * sigmoid).add_(silu)
        d_gate = slope.mul_(up).mul_(gradient)
        return silu * up, d_gate, silu.mul_(gradient)


@dataclass(frozen=True)
class SituGLUActivation:
    beta: float = 4.0
    linear_beta: float = 25.0

    def value(self, gate: Tensor, up: Tensor) -> Tensor:
        g, u = _wide(gate), _wide(up)
        bounded_gate = torch.tanh(g / self.beta) * self.beta * torch.sigmoid(g)
        return (bounded_gate * (torch.tanh(u / self.linear_beta) * self.linear_beta)).to(gate.dtype)

    def backward(self, gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        g, u, d = _wide(gate), _wide(up), _wide(gradient)
        tanh_g, sigmoid, tanh_u = torch.tanh(g / self.beta), torch.sigmoid(g), torch.tanh(u / self.linear_beta)
        gate_value, up_value = self.beta * tanh_g * sigmoid, self.linear_beta * tanh_u
        gate_slope = sigmoid * (1 - tanh_g.square()) + gate_value * (1 - sigmoid)
        d_gate, d_up = d * up_value * gate_slope, d * gate_value * (1 - tanh_u.square())
        return (gate_value * up_value).to(gate.dtype), d_gate.to(gate.dtype), d_up.to(up.dtype)


def gated(activation: GatedActivation, gate: Tensor, up: Tensor) -> Tensor:
    """``activation.value(gate, up)`` that keeps gate and up alone for backward."""
    return _Gated.apply(activation, gate, up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: GatedActivation, gate: Tensor, up: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return activation.value(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        _, d_gate, d_up = ctx.activation.backward(*ctx.saved_tensors, gradient)
        return None, d_gate, d_up


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
