"""Differences and ratios between arms of one ladder, on the log-multiplier scale.

Arms share their baseline's runs and its curve L(D), whose luck cancels between them; adding up the arms' own intervals
would overstate the error. What counts are seed pairs that every arm in question completed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .budget_curve import BudgetCurve
from .multiplier import log_tokens
from .pairs import Pair, RungPairs
from .statistics import ALPHA, Estimate, combine


@dataclass(frozen=True)
class Contrasts:
    """Log token multipliers of several arms over the same seed pairs.

    logs [pairs, arms]; curve_errors: covariance [arms, arms] of their means that the error of each rung's L(D) adds, with
    its degrees of freedom; known: whether those errors are known.
    """

    arms: tuple[str, ...]
    logs: np.ndarray
    curve_errors: tuple[tuple[np.ndarray, int], ...]
    known: bool

    def estimate(self, weights: Mapping[str, float]) -> Estimate:
        """The weighted sum of mean log multipliers; arms left out (the baseline, whose is 0) weigh nothing."""
        vector = self._vector(weights)
        values = self.logs @ vector
        n = len(values)
        if n == 1 or not self.known:
            return Estimate(float(values.mean()), None, 0, n)
        parts = [(float(values.var(ddof=1)) / n, float(n - 1))]
        parts += [(float(vector @ error @ vector), float(df)) for error, df in self.curve_errors]
        parts = [part for part in parts if part[0] > 1e-20]
        return combine(float(values.mean()), parts, n) if parts else Estimate(float(values.mean()), 0.0, n - 1, n)

    def ratio(
        self, above: Mapping[str, float], below: Mapping[str, float], alpha: float = ALPHA
    ) -> tuple[float | None, tuple[float, float] | None]:
        """``above`` over ``below`` with Fieller's interval; (None, None) where ``below`` is zero.

        No interval where ``below`` is not distinguishable from zero: every ratio is then possible.
        """
        a, b = self._vector(above), self._vector(below)
        means = self.logs.mean(0)
        top, bottom = float(means @ a), float(means @ b)
        if bottom == 0:
            return None, None
        n = len(self.logs)
        if n == 1 or not self.known:
            return top / bottom, None
        covariance = np.atleast_2d(np.cov(self.logs.T)) / n + sum((error for error, _ in self.curve_errors), 0.0)
        df = min([n - 1, *(df for _, df in self.curve_errors)])
        t2 = float(stats.t.ppf(1 - alpha / 2, df)) ** 2
        # ratios r with (top - r bottom)^2 <= t^2 var(top - r bottom): a quadratic in r
        square = bottom**2 - t2 * float(b @ covariance @ b)
        middle = top * bottom - t2 * float(a @ covariance @ b)
        rest = top**2 - t2 * float(a @ covariance @ a)
        if square <= 0:
            return top / bottom, None
        root = math.sqrt(max(middle**2 - square * rest, 0.0))
        return top / bottom, ((middle - root) / square, (middle + root) / square)

    def _vector(self, weights: Mapping[str, float]) -> np.ndarray:
        return np.array([weights.get(arm, 0.0) for arm in self.arms])


def contrasts(
    arms: Mapping[str, Sequence[RungPairs]], curves: Mapping[str, BudgetCurve | None]
) -> Contrasts | None:  # fmt: skip
    """arms: name -> its pairs at every rung; curves: rung name -> the baseline's L(D). None without a common pair."""
    rungs = [_common(pairs) for pairs in zip(*arms.values(), strict=True)]
    names = [pairs.rung.name for pairs in next(iter(arms.values()))]
    used = [(rung, curve) for rung, curve in zip(rungs, (curves[n] for n in names), strict=True)
            if rung and curve is not None and curve.resolved]  # fmt: skip
    if not used:
        return None
    logs = np.concatenate([_logs(rung, curve, curve.parameters) for rung, curve in used])
    errors = []
    for rung, curve in used:
        if curve.covariance is not None:
            share = len(rung) / len(logs)
            errors.append((share**2 * _curve_error(rung, curve), curve.df))
    return Contrasts(tuple(arms), logs, tuple(errors), len(errors) == len(used))


def _common(pairs: Sequence[RungPairs]) -> list[list[Pair]]:
    """[seed][arm] of the seeds that every arm completed."""
    found = [{pair.seed: pair for pair in arm.completed} for arm in pairs]
    seeds = [seed for seed in found[0] if all(seed in arm for arm in found)]
    return [[arm[seed] for arm in found] for seed in seeds]


def _logs(rung: list[list[Pair]], curve: BudgetCurve, parameters: np.ndarray) -> np.ndarray:
    return np.array([[log_tokens(p, curve, parameters) - math.log(p.arm.tokens) for p in row] for row in rung])


def _curve_error(rung: list[list[Pair]], curve: BudgetCurve) -> np.ndarray:
    """Delta method, all arms at once."""
    steps = 1e-5 * np.maximum(np.abs(curve.parameters), 1e-3)
    slopes = []
    for index, step in enumerate(steps):
        moved = [curve.parameters.copy(), curve.parameters.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        ahead, back = (_logs(rung, curve, parameters).mean(0) for parameters in moved)
        slopes.append((ahead - back) / (2 * step))
    gradient = np.stack(slopes, 1)
    return gradient @ curve.covariance @ gradient.T
