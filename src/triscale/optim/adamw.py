"""AdamW with the same grouping, decay rules and state handling as MuonClip: the ladder's baseline optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .base import RuleOptimizer


class AdamW(RuleOptimizer):
    """AdamW on every parameter of a module (or named parameters, or groups); gates do not decay.

    update_rms: scale the update of every matrix to exactly this root mean square (Moonlight's "Update Norm" control,
    arXiv 2502.16982, Table 1), None = as is.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        lr: float = 1e-3
        weight_decay: float = 0.1
        beta1: float = 0.9
        beta2: float = 0.95
        eps: float = 1e-8
        update_rms: float | None = None

        def __post_init__(self) -> None:
            check_rates(self.lr, self.weight_decay, self.beta1, self.beta2)

        def build(self, model: nn.Module) -> AdamW:
            return AdamW(model, self.lr, self.weight_decay, (self.beta1, self.beta2), self.eps, self.update_rms)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        update_rms: float | None = None,
    ):
        check_rates(lr, weight_decay, *betas)
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": tuple(betas), "eps": eps, "update_rms": update_rms}
        super().__init__(params, defaults, muon=False)


def check_rates(lr: float, weight_decay: float, *betas: float) -> None:
    """Raise ``ValueError`` (which a config turns into an error with its path) for rates out of range."""
    if not lr >= 0:
        raise ValueError(f"lr: {lr} must be zero or more")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay: {weight_decay} must be zero or more")
    for beta in betas:
        if not 0 <= beta < 1:
            raise ValueError(f"beta or momentum: {beta} must lie in [0, 1)")
