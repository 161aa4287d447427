"""Small-sample statistics: t-intervals of paired differences, power, smallest detectable effect, Holm.

With two or three seeds a bootstrap interval covers far too little (there are three distinct resamples of two values),
so every interval here is a t-interval whose degrees of freedom are stated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize, special, stats

ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error. ``se`` is None when it cannot be known (``df`` 0: one value, no repetition)."""

    mean: float
    se: float | None
    df: float
    n: int
    alpha: float = ALPHA

    @property
    def known(self) -> bool:
        return self.se is not None and self.df > 0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The two-sided t-interval at level ``1 - alpha``; None when the error is unknown."""
        if self.se is None or self.df <= 0:
            return None
        half = float(stats.t.ppf(1 - self.alpha / 2, self.df)) * self.se
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float | None:
        """Two-sided p-value of "the mean is zero"; None when the error is unknown."""
        if self.se is None or self.df <= 0:
            return None
        if self.se == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * special.stdtr(self.df, -abs(self.mean) / self.se))


def paired_t(differences: Sequence[float], resolution: float = 0.0, alpha: float = ALPHA) -> Estimate:
    """Mean of paired differences with the one-sample t error (n - 1 degrees of freedom).

    Pairs of several rungs go in together, so what differs between rungs counts as noise. Pooling the scatter within
    rungs instead would promise more: it takes the noise to be the same on every rung, and where it is not (ten times,
    with two seeds on two rungs) 12 % of verdicts would be false. This one stays at or below ``alpha`` then.

    resolution: the smallest standard deviation believed; two equal differences do not prove that a third would be
    the same to the last bit. Raises ``ValueError`` without any difference.
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    if n == 0:
        raise ValueError("no differences to average")
    mean = float(values.mean())
    if n == 1:
        return Estimate(mean, None, 0, 1, alpha)
    deviation = max(float(values.std(ddof=1)), resolution)
    return Estimate(mean, deviation / math.sqrt(n), n - 1, n, alpha)


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation within groups and its degrees of freedom (0 and 0 without any repetition)."""
    arrays = [np.asarray(group, dtype=float) for group in groups if len(group)]
    df = sum(len(a) - 1 for a in arrays)
    if df == 0:
        return 0.0, 0
    return math.sqrt(sum(float(((a - a.mean()) ** 2).sum()) for a in arrays) / df), df


def combine(mean: float, parts: Sequence[tuple[float, float]], n: int, alpha: float = ALPHA) -> Estimate:
    """An estimate whose variance is a sum of independent (variance, degrees of freedom): Welch-Satterthwaite."""
    total = sum(variance for variance, _ in parts)
    if any(df <= 0 for _, df in parts):
        return Estimate(mean, None, 0, n, alpha)
    if total == 0:
        return Estimate(mean, 0.0, min(df for _, df in parts), n, alpha)
    df = total**2 / sum(variance**2 / df for variance, df in parts)
    return Estimate(mean, math.sqrt(total), df, n, alpha)


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Holm's step-down adjusted p-values. Arms without a p-value count as tests that were made (p = 1)."""
    known = sorted((p, name) for name, p in p_values.items() if p is not None)
    adjusted: dict[str, float | None] = dict.fromkeys(p_values)
    running = 0.0
    for rank, (p, name) in enumerate(known):
        running = max(running, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = running
    return adjusted


# Nodes of the chi distribution's quantiles: the power is an average over what the estimated deviation may turn out.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(400)
_QUANTILES = (_NODES + 1) / 2


def power_of(shift: float, df: float, alpha: float = ALPHA) -> float:
    """Probability that a two-sided t-test finds a true effect of ``shift`` standard errors (non-central t)."""
    critical = -float(special.stdtrit(df, alpha / 2))
    spread = np.sqrt(special.chdtri(df, 1 - _QUANTILES) / df)
    found = special.ndtr(shift - critical * spread) + special.ndtr(-shift - critical * spread)
    return float((found * _WEIGHTS).sum() / 2)


@lru_cache(maxsize=4096)
def detectable_shift(df: float, alpha: float = ALPHA, power: float = POWER) -> float:
    """The true effect, in standard errors, that a two-sided t-test finds with probability ``power``."""
    if not alpha < power < 1:
        raise ValueError(f"power must lie between alpha ({alpha}) and 1, got {power}")
    high = 4.0
    while power_of(high, df, alpha) < power:
        high *= 2
    return float(optimize.brentq(lambda shift: power_of(shift, df, alpha) - power, 0, high, xtol=1e-6))


def smallest_detectable(estimate: Estimate, tests: int = 1, power: float = POWER) -> float | None:
    """The smallest true effect that this design finds with probability ``power`` (in the estimate's unit).

    tests: how many arms share the error rate; the first step of Holm's procedure (alpha / tests) is taken, so the
    stated power is a lower bound. None when there is no repetition to estimate an error from.
    """
    if estimate.se is None or estimate.df <= 0:
        return None
    return estimate.se * detectable_shift(estimate.df, estimate.alpha / max(tests, 1), power)
