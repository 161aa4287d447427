"""Mixture of experts: a sigmoid router with a correction bias, routed and shared experts, optionally in a latent space.

Router and experts as in DeepSeek-V3, Moonlight, Kimi K2 and Kimi Linear (arXiv 2412.19437, section 2.1.2)::

    y = sum_j w_j E_j(x) + Shared(x)

Stable LatentMoE of Kimi K3 (report, section 2.3): routed experts live in a narrower space behind one shared projection,
and a norm takes the scale of the mixture out before it returns::

    z = W_down x ;   u = sum_j w_j E_j(z) ;   y = W_up RMSNorm(u) + Shared(x)

The router and the shared experts always see the full x. Submodule names follow the published checkpoints; the routed
experts are two stacks, ``experts.gate_up_proj`` [E, 2 hidden, D] (gate rows first) and ``experts.down_proj``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from triscale.config import Role, part
from triscale.ops.gated_activation import GatedActivation, SituGLUActivation, SwiGLUActivation
from triscale.ops.grouped_experts import grouped_experts
from triscale.ops.routing import balanced_scaling

from .batch import TokenBatch
from .context import BuildContext
from .feed_forward import SwiGLU, default_hidden
from .norm import RMSNorm
from .parts import BALANCES
from .router import Router
from .situ import SituGLU


class RoutedExperts(nn.Module):
    """The stacked weights of E gated experts, [tokens, D] -> [tokens, D]."""

    def __init__(self, experts: int, width: int, hidden: int, activation: GatedActivation, context: BuildContext):
        super().__init__()
        self.count, self.width, self.hidden, self.activation = experts, width, hidden, activation
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width, **context.factory))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden, **context.factory))
        for stack in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(stack, std=0.02)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if hasattr(gate_up, "device_mesh"):  # a DTensor: experts are spread over ranks
            from .expert_parallel import exchange_and_compute

            return exchange_and_compute(x, indices, weights, gate_up, down, self.activation)
        return grouped_experts(x, indices, weights, gate_up, down, self.activation)

    def parameter_roles(self) -> dict[str, Role]:
        """Optimizers treat every expert's gate, up and down as matrices of their own."""
        return {
            "gate_up_proj": Role(kind="matrix", blocks=(self.hidden, self.hidden)),
            "down_proj": Role(kind="matrix"),
        }


class MixtureOfExperts(nn.Module):
    """[1, N, width] -> [1, N, width]; ``top_k`` of ``experts`` per token, and ``shared`` experts for every token."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """hidden: inner width of one expert; None = a dense layer's width (8/3 of the model's) split over the active
        experts. shared: shared experts, held as one layer of ``shared * hidden``. groups, top_groups: group-limited
        choice. routed_scaling: None = the value that keeps the routed branch's scale (1 with a latent norm).
        latent: width of the routed experts' space (K3); None = the model's. balance: what moves the router's bias.
        sequence_loss: weight of the sequence-wise balance loss (DeepSeek-V3: 1e-4)."""

        experts: int = 8
        top_k: int = 2
        hidden: int | None = None
        shared: int = 1
        groups: int = 1
        top_groups: int = 1
        renormalize: bool = True
        routed_scaling: float | None = None
        latent: int | None = None
        latent_norm: bool = True
        activation: Literal["swiglu", "situ_glu"] = "swiglu"
        situ_beta: float = 4.0
        situ_linear_beta: float = 25.0
        balance: Any = part(BALANCES, "quantile")
        sequence_loss: float = 0.0

        def __post_init__(self) -> None:
            if not 1 <= self.top_k <= self.experts:
                raise ValueError(f"top_k: {self.top_k} must be between 1 and the number of experts ({self.experts})")
            if self.shared < 0:
                raise ValueError(f"shared: {self.shared} must not be negative")
            for name in ("hidden", "latent"):
                if getattr(self, name) is not None and getattr(self, name) < 1:
                    raise ValueError(f"{name}: {getattr(self, name)} must be at least 1, or left out")
            self._check_groups()

        def _check_groups(self) -> None:
            if self.groups < 1 or self.experts % self.groups:
                raise ValueError(f"groups: {self.groups} must divide the number of experts ({self.experts})")
            if not 1 <= self.top_groups <= self.groups:
                raise ValueError(f"top_groups: {self.top_groups} must be between 1 and groups ({self.groups})")
            if self.top_k > self.top_groups * (self.experts // self.groups):
                raise ValueError(f"top_k: {self.top_k} experts do not fit in top_groups = {self.top_groups} groups")

        def expert_hidden(self, width: int) -> int:
            return self.hidden or -(-default_hidden(width) // (self.top_k + self.shared) // 8) * 8

        def scaling(self) -> float:
            if self.routed_scaling is not None:
                return self.routed_scaling
            latent_norm = self.latent is not None and self.latent_norm
            return 1.0 if latent_norm else balanced_scaling(self.experts, self.top_k)

        def build(self, context: BuildContext) -> MixtureOfExperts:
            return MixtureOfExperts(self, context)

    def __init__(self, config: Config, context: BuildContext):
        super().__init__()
        self.config, self.width = config, context.width
        self.hidden, self.latent = config.expert_hidden(context.width), config.latent or context.width
        situ = config.activation == "situ_glu"
        activation = SituGLUActivation(config.situ_beta, config.situ_linear_beta) if situ else SwiGLUActivation()
        self.gate = Router(config, context)
        self.experts = RoutedExperts(config.experts, self.latent, self.hidden, activation, context)
        self.shared_experts: SwiGLU | None = None
        if config.shared:
            inner = config.shared * self.hidden
            self.shared_experts = (
                SituGLU(context.width, inner, context, activation)
                if isinstance(activation, SituGLUActivation)
                else SwiGLU(context.width, inner, context)
            )
        if config.latent is not None:
            self.routed_expert_down_proj = nn.Linear(self.width, self.latent, bias=False, **context.factory)
            self.routed_expert_up_proj = nn.Linear(self.latent, self.width, bias=False, **context.factory)
            self.routed_expert_norm = (
                RMSNorm(self.latent, context.norm_eps, **context.factory) if config.latent_norm else None
            )

    def forward(self, x: Tensor, batch: TokenBatch) -> Tensor:
        flat = x.reshape(-1, self.width)
        routing = self.gate(flat, batch)
        routed = self._routed(flat, *routing)
        if self.shared_experts is not None:
            routed = routed + self.shared_experts(flat, batch)
        return routed.to(x.dtype).view_as(x)

    def _routed(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        if self.config.latent is None:
            return self.experts(x, indices, weights)
        mixed = self.experts(self.routed_expert_down_proj(x), indices, weights)
        if self.routed_expert_norm is not None:
            mixed = self.routed_expert_norm(mixed)
        return self.routed_expert_up_proj(mixed)

    def parameter_roles(self) -> dict[str, Role]:
        if self.config.latent is None:
            return {}
        return {f"routed_expert_{name}_proj.weight": Role(kind="matrix") for name in ("down", "up")}

    def inactive_parameters(self) -> int:
        """Parameters of the experts that one token does not visit."""
        return (self.config.experts - self.config.top_k) * 3 * self.latent * self.hidden

    def flops_per_token(self) -> int:
        config, width = self.config, self.width
        products = width * config.experts + 3 * width * config.shared * self.hidden
        products += 3 * config.top_k * self.latent * self.hidden
        return 2 * (products + (2 * width * self.latent if config.latent is not None else 0))
