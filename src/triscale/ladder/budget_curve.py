"""The baseline's loss over token budgets at one rung: the ruler by which multipliers are read.

Early in training log L against log D is not a straight line (it bends down before it bends up towards a floor), and a
multiplier read off a straight line would inherit the misfit. Between the budgets the curve is therefore a parabola in
log-log, that is, a power law whose exponent changes with D; beyond them it goes on along its tangent, and what is read
there is marked as extrapolated. With two budgets it is a power law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import stats

from .fits import Fit, numeric_gradient
from .statistics import ALPHA

UNRESOLVED = 3.0  # an exponent below this many of its standard errors is not used to convert losses into tokens


@dataclass(frozen=True, kw_only=True)
class BudgetCurve(Fit):
    """log L = level - exponent·u + bend·u² with u = log D - centre, inside [lowest, highest].

    parameters: (level, exponent) or (level, exponent, bend). covariance: theirs, from the spread of the curves fitted to
    each seed alone (source "seeds"), or, with one seed and a spare budget, from the scatter around the curve; None when
    neither exists. Decay branches of one trunk share their seed's luck and are not independent points.
    """

    parameters: np.ndarray
    centre: float

    @property
    def ends(self) -> tuple[float, float]:
        return float(np.log(self.lowest)) - self.centre, float(np.log(self.highest)) - self.centre

    def loss(self, tokens: np.ndarray | float) -> np.ndarray:
        return np.exp(self.log_loss(np.log(tokens)))

    def log_loss(self, log_tokens: np.ndarray | float, parameters: np.ndarray | None = None) -> np.ndarray:
        level, exponent, bend = _three(self.parameters if parameters is None else parameters)
        u = np.asarray(log_tokens) - self.centre
        inside = np.clip(u, *self.ends)
        slope = -exponent + 2 * bend * inside
        return level - exponent * inside + bend * inside**2 + slope * (u - inside)

    def log_tokens_for(self, loss: float, parameters: np.ndarray | None = None) -> float:
        """log D at which the curve reaches ``loss``; defined where the curve falls (see ``resolved``)."""
        level, exponent, bend = _three(self.parameters if parameters is None else parameters)
        wanted = float(np.log(loss))
        for end, beyond in zip(self.ends, (np.greater, np.less), strict=True):
            reached = level - exponent * end + bend * end**2
            if beyond(wanted, reached):
                return self.centre + end + (wanted - reached) / (-exponent + 2 * bend * end)
        root = np.sqrt(max(exponent**2 - 4 * bend * (level - wanted), 0.0))
        return self.centre + 2 * (level - wanted) / (exponent + root)

    def exponent_at(self, tokens: float, parameters: np.ndarray | None = None) -> float:
        """The local power: -d log L / d log D."""
        _, exponent, bend = _three(self.parameters if parameters is None else parameters)
        return exponent - 2 * bend * float(np.clip(np.log(tokens) - self.centre, *self.ends))

    def exponent_interval(self, tokens: float) -> tuple[float, float] | None:
        variance = self.variance_of(lambda parameters: self.exponent_at(tokens, parameters))
        if variance is None:
            return None
        half = float(stats.t.ppf(1 - ALPHA / 2, self.df)) * float(np.sqrt(variance))
        return self.exponent_at(tokens) - half, self.exponent_at(tokens) + half

    @property
    def resolved(self) -> bool:
        """Whether the loss demonstrably falls over the budgets, so that the curve can be read backwards."""
        if min(self.exponent_at(self.lowest), self.exponent_at(self.highest)) <= 0:
            return False
        error = 0.0 if self.covariance is None else float(np.sqrt(self.covariance[1, 1]))
        return float(self.parameters[1]) > UNRESOLVED * error

    def band(self, tokens: np.ndarray, alpha: float = ALPHA) -> tuple[np.ndarray, np.ndarray] | None:
        """Pointwise interval of the curve; None without a covariance."""
        if self.covariance is None:
            return None
        variances = [self.variance_of(partial(self._log_loss_at, x)) or 0.0 for x in np.log(tokens)]
        half = float(stats.t.ppf(1 - alpha / 2, self.df)) * np.sqrt(variances)
        return self.loss(tokens) * np.exp(-half), self.loss(tokens) * np.exp(half)

    def _log_loss_at(self, log_tokens: float, parameters: np.ndarray) -> float:
        return float(self.log_loss(log_tokens, parameters))

    def variance_of(self, function: Callable[[np.ndarray], float]) -> float | None:
        """Variance that the curve's error gives to ``function(parameters)`` (delta method)."""
        if self.covariance is None:
            return None
        gradient = numeric_gradient(function, self.parameters)
        return float(gradient @ self.covariance @ gradient)


def fit_budget_curve(losses: Mapping[int, Mapping[float, float]]) -> BudgetCurve | None:
    """Fit ``{seed: {tokens: loss}}``; seeds may lack points. None with fewer than two different budgets."""
    points = sorted({x for curve in losses.values() for x in curve})
    if len(points) < 2:
        return None
    centre = float(np.log(points).mean())
    u = np.log(points) - centre
    design = np.stack([np.ones_like(u), -u, u**2], axis=1)[:, : min(len(points), 3)]
    table = np.array([[np.log(curve[x]) if x in curve else np.nan for x in points] for curve in losses.values()])
    mean = np.nanmean(table, axis=0)
    parameters, *_ = np.linalg.lstsq(design, mean, rcond=None)
    complete = table[~np.isnan(table).any(axis=1)]
    covariance, df, source = None, 0, "none"
    spare = len(points) - design.shape[1]
    if len(complete) > 1:
        own = np.linalg.lstsq(design, complete.T, rcond=None)[0]
        covariance, df, source = np.cov(own) / len(complete), len(complete) - 1, "seeds"
    elif spare > 0:
        residual = mean - design @ parameters
        covariance, df, source = float(residual @ residual) / spare * np.linalg.inv(design.T @ design), spare, "scatter"
    return BudgetCurve(parameters=parameters, centre=centre, covariance=covariance, df=df, source=source,
                       points=len(points), seeds=len(losses), lowest=points[0], highest=points[-1])  # fmt: skip


def _three(parameters: np.ndarray) -> tuple[float, float, float]:
    level, exponent, *bend = parameters
    return float(level), float(exponent), float(bend[0]) if bend else 0.0
