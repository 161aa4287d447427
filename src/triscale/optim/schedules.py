"""Learning-rate schedules: a factor on the base rate as a function of training progress.

Progress and lengths share one unit, tokens or steps, whichever the caller counts in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from triscale.config import Parts

SCHEDULES = Parts(
    "schedule",
    {
        "constant": "triscale.optim.schedules:Constant",
        "cosine": "triscale.optim.schedules:Cosine",
        "wsd": "triscale.optim.schedules:WarmupStableDecay",
    },
)


def _check(**fractions: float) -> None:
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: {value} must lie between 0 and 1")


class Schedule(ABC):
    """A callable progress -> factor in [0, 1]. ``total``: the planned length; progress beyond it stays at the end."""

    def __init__(self, total: float, warmup: float):
        if not total > 0:
            raise ValueError(f"total: {total} must be positive")
        self.total, self.warmup = float(total), warmup * total

    def __call__(self, progress: float) -> float:
        progress = min(max(float(progress), 0.0), self.total)
        if progress < self.warmup:
            return progress / self.warmup
        return self.after_warmup(progress)

    @abstractmethod
    def after_warmup(self, progress: float) -> float:
        """The factor from the end of the warm-up on."""

    def phase(self, progress: float) -> str:
        """ "warmup", "stable" or "decay"."""
        return "warmup" if progress < self.warmup else "decay"


class Constant(Schedule):
    """Linear warm-up, then 1."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """warmup: share of the total length."""

        warmup: float = 0.01

        def __post_init__(self) -> None:
            _check(warmup=self.warmup)

        def build(self, total: float) -> Constant:
            return Constant(total, self.warmup)

    def after_warmup(self, progress: float) -> float:
        return 1.0

    def phase(self, progress: float) -> str:
        return "warmup" if progress < self.warmup else "stable"


class Cosine(Schedule):
    """Linear warm-up, then half a cosine from 1 to ``minimum`` (Kimi K3: 1 % warm-up)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """warmup: share of the total length. minimum: the factor at the end."""

        warmup: float = 0.01
        minimum: float = 0.1

        def __post_init__(self) -> None:
            _check(warmup=self.warmup, minimum=self.minimum)

        def build(self, total: float) -> Cosine:
            return Cosine(total, self.warmup, self.minimum)

    def __init__(self, total: float, warmup: float = 0.01, minimum: float = 0.1):
        super().__init__(total, warmup)
        self.minimum = minimum

    def after_warmup(self, progress: float) -> float:
        share = (progress - self.warmup) / max(self.total - self.warmup, 1e-12)
        return self.minimum + (1 - self.minimum) * 0.5 * (1 + math.cos(math.pi * share))


class WarmupStableDecay(Schedule):
    """Linear warm-up, a constant trunk, and a decay over the last part of the run (WSD; Kimi K2).

    The trunk does not depend on the total length when the warm-up is given in absolute units, so that one trunk
    serves several lengths: train it with a constant rate, and branch a run of total length T from the trunk's
    checkpoint at ``decay_start``.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """warmup, decay: shares of the total length. warmup_length: absolute warm-up, overrides ``warmup`` if set.

        minimum: the factor at the end. shape: of the decay, "linear", "cosine" or "sqrt" (1 - sqrt(share)).
        """

        warmup: float = 0.01
        warmup_length: float | None = None
        decay: float = 0.2
        minimum: float = 0.0
        shape: Literal["linear", "cosine", "sqrt"] = "linear"

        def __post_init__(self) -> None:
            _check(warmup=self.warmup, decay=self.decay, minimum=self.minimum)
            if self.warmup_length is not None and self.warmup_length < 0:
                raise ValueError(f"warmup_length: {self.warmup_length} must be zero or more")
            if self.warmup_length is None and self.warmup + self.decay > 1:
                raise ValueError(f"warmup + decay: {self.warmup + self.decay} exceeds the whole run")

        def build(self, total: float) -> WarmupStableDecay:
            warmup = self.warmup if self.warmup_length is None else min(self.warmup_length / total, 1.0)
            return WarmupStableDecay(total, warmup, self.decay, self.minimum, self.shape)

    def __init__(
        self, total: float, warmup: float = 0.01, decay: float = 0.2, minimum: float = 0.0, shape: str = "linear"
    ):
        super().__init__(total, warmup)
        self.decay_start = max(self.total * (1 - decay), self.warmup)
        self.minimum, self.shape = minimum, shape

    def after_warmup(self, progress: float) -> float:
        if progress <= self.decay_start:
            return 1.0
        share = (progress - self.decay_start) / (self.total - self.decay_start)
        fall = {"linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share)), "sqrt": 1 - math.sqrt(share)}
        return self.minimum + (1 - self.minimum) * fall[self.shape]

    def phase(self, progress: float) -> str:
        if progress < self.warmup:
            return "warmup"
        return "stable" if progress <= self.decay_start else "decay"
