"""Power laws of the loss over the rungs: L(C) = a·C^-b + c, C the training FLOPs.

The line is fitted to log L against log C; a floor c is added only when the data can tell it from none (F-test). The
error of the fit is the larger of two honest ones: the scatter of the mean points around the curve, which includes its
lack of fit, and the spread of the curves fitted to each seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

from .statistics import ALPHA


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Where a fitted curve comes from and how sure it is.

    covariance: of the parameters; None when neither repetition nor a spare point gives one. df: its degrees of freedom.
    source: what it was taken from, "seeds" or "scatter". lowest, highest: the range of x that was fitted.
    """

    covariance: np.ndarray | None
    df: int
    source: str
    points: int
    seeds: int
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class PowerLaw(Fit):
    """log L = log(exp(level - b·(log x - centre)) + floor).

    The covariance is of (level, b) or (level, b, floor); source is whichever error was the larger.
    """

    level: float
    exponent: float
    floor: float
    centre: float
    largest_residual: float

    @property
    def scale(self) -> float:
        """a in L = a·x^-b + c."""
        return float(np.exp(self.level + self.exponent * self.centre))

    @property
    def parameters(self) -> np.ndarray:
        return np.array([self.level, self.exponent, self.floor][: 3 if self.floor else 2])

    @property
    def exponent_interval(self) -> tuple[float, float] | None:
        if self.covariance is None:
            return None
        half = float(stats.t.ppf(1 - ALPHA / 2, self.df)) * float(np.sqrt(self.covariance[1, 1]))
        return self.exponent - half, self.exponent + half

    def loss(self, x: np.ndarray | float) -> np.ndarray:
        return _curve(self.parameters, np.log(x) - self.centre)

    def band(self, x: np.ndarray, alpha: float = ALPHA) -> tuple[np.ndarray, np.ndarray] | None:
        """Pointwise interval of the curve (delta method on log L); None without a covariance."""
        if self.covariance is None:
            return None
        offsets = np.log(x) - self.centre
        slopes = _gradient(self.parameters, offsets)
        error = np.sqrt(np.einsum("ki,ij,kj->k", slopes, self.covariance, slopes))
        half = float(stats.t.ppf(1 - alpha / 2, self.df)) * error
        return self.loss(x) * np.exp(-half), self.loss(x) * np.exp(half)


def fit_power_law(losses: Mapping[int, Mapping[float, float]]) -> PowerLaw | None:
    """Fit ``{seed: {x: loss}}``; seeds may lack points. None with fewer than two different x.

    A point is the geometric mean over the seeds that have it.
    """
    points = sorted({x for curve in losses.values() for x in curve})
    if len(points) < 2:
        return None
    log_x = np.log(points)
    centre = float(log_x.mean())
    offsets = log_x - centre
    table = np.array([[np.log(curve[x]) if x in curve else np.nan for x in points] for curve in losses.values()])
    mean = np.nanmean(table, axis=0)
    straight, residual = _fit_line(offsets, mean)
    shared: dict[str, Any] = {"centre": centre, "points": len(points), "seeds": len(losses), "lowest": float(points[0]),
              "highest": float(points[-1])}  # fmt: skip
    curved = _fit_floor(offsets, mean, float(residual @ residual))
    if curved is not None:
        values, residual, covariance = curved
        return PowerLaw(level=values[0], exponent=values[1], floor=values[2], covariance=covariance,
                        df=len(points) - 3, source="scatter", largest_residual=float(np.abs(residual).max()),
                        **shared)  # fmt: skip
    covariance, df, source = _line_error(offsets, table, residual)
    return PowerLaw(level=straight[0], exponent=straight[1], floor=0.0, covariance=covariance, df=df, source=source,
                    largest_residual=float(np.abs(residual).max()), **shared)  # fmt: skip


def _fit_line(offsets: np.ndarray, log_loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least squares for (level, exponent); the offsets are centred, so the two are uncorrelated."""
    offsets = offsets - offsets.mean()  # a seed that lacks points has its own centre
    exponent = -float(offsets @ log_loss) / float(offsets @ offsets)
    level = float(log_loss.mean())
    return np.array([level, exponent]), log_loss - (level - exponent * offsets)


def _line_error(
    offsets: np.ndarray, table: np.ndarray, residual: np.ndarray
) -> tuple[np.ndarray | None, int, str]:  # fmt: skip
    spread = float(offsets @ offsets)
    options = []
    if len(offsets) > 2:
        df = len(offsets) - 2
        variance = float(residual @ residual) / df
        options.append((np.diag([variance / len(offsets), variance / spread]), df, "scatter"))
    complete = table[~np.isnan(table).any(axis=1)]
    if len(complete) > 1:
        lines = np.array([_fit_line(offsets, row)[0] for row in complete])
        options.append((np.cov(lines.T) / len(complete), len(complete) - 1, "seeds"))
    if not options:
        return None, 0, "none"
    return max(options, key=lambda option: option[0][1, 1])


def _fit_floor(offsets: np.ndarray, log_loss: np.ndarray, line_squares: float):
    """(parameters, residual, covariance) of the curve with a floor, or None when the floor cannot be identified.

    For a given exponent, level and floor enter linearly (relative least squares), so only the exponent is searched.
    Identified means: a positive floor, a spare point, and an F-test against the straight line that passes.
    """
    df = len(offsets) - 3
    if df < 1:
        return None
    loss = np.exp(log_loss)

    def solve(exponent: float) -> tuple[np.ndarray, float]:
        design = np.stack([np.exp(-exponent * offsets) / loss, 1 / loss], axis=1)
        values, *_ = np.linalg.lstsq(design, np.ones(len(loss)), rcond=None)
        return values, float(((design @ values - 1) ** 2).sum())

    grid = np.geomspace(0.02, 3, 40)
    squares = [solve(b)[1] for b in grid]
    best = int(np.argmin(squares))
    if best in (0, len(grid) - 1):
        return None
    found = optimize.minimize_scalar(lambda b: solve(b)[1], bounds=(grid[best - 1], grid[best + 1]), method="bounded",
                                     options={"xatol": 1e-7})  # fmt: skip
    (factor, floor), _ = solve(float(found.x))
    if floor <= 0 or factor <= 0:
        return None
    parameters = np.array([np.log(factor), float(found.x), floor])
    residual = log_loss - np.log(_curve(parameters, offsets))
    remaining = float(residual @ residual)
    noise = max(remaining / df, 1e-14)  # losses carry about seven digits
    if float(stats.f.sf((line_squares - remaining) / noise, 1, df)) > ALPHA:
        return None
    slopes = _gradient(parameters, offsets)
    return parameters, residual, noise * np.linalg.inv(slopes.T @ slopes)


def _curve(parameters: np.ndarray, offsets: np.ndarray | float) -> np.ndarray:
    level, exponent, *floor = parameters
    return np.exp(level - exponent * offsets) + (floor[0] if floor else 0.0)


def _gradient(parameters: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """d log L / d parameters, [points, parameters]."""
    level, exponent, *floor = parameters
    falling = np.exp(level - exponent * offsets)
    total = falling + (floor[0] if floor else 0.0)
    columns = [falling / total, -offsets * falling / total]
    return np.stack(columns + [1 / total] * len(floor), axis=1)


def numeric_gradient(function: Callable[[np.ndarray], float], parameters: np.ndarray) -> np.ndarray:
    """Central differences."""
    gradient = np.empty(len(parameters))
    for i, value in enumerate(parameters):
        step = np.zeros(len(parameters))
        step[i] = 1e-5 * max(abs(value), 1e-2)
        gradient[i] = (function(parameters + step) - function(parameters - step)) / (2 * step[i])
    return gradient
