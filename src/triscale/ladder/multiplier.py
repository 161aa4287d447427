"""How many times its tokens (or FLOPs, or seconds) the baseline would need to reach the arm's loss.

Per seed pair, on the log scale: the baseline's curve L(D) of the rung is shifted to pass through the loss of the pair's
own baseline run, and turned around at the loss of the pair's arm. Training cost is linear in tokens, so the multiplier
in FLOPs (seconds) is the one in tokens times the ratio of what a token costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .budget_curve import BudgetCurve
from .pairs import Pair, RungPairs
from .statistics import Estimate, combine, paired_t

COSTS = ("tokens", "flops", "seconds")


@dataclass(frozen=True)
class RungMultiplier:
    """One arm at one rung. logs: cost -> log multiplier of every completed pair. fit_variance, fit_df: what the error
    of L(D) adds to their mean (None = unknown). extrapolated: the baseline's budgets do not reach that far. reason:
    why there is no multiplier, empty if there is."""

    logs: dict[str, list[float]] = field(default_factory=dict)
    fit_variance: float | None = None
    fit_df: int = 0
    extrapolated: bool = False
    reason: str = ""

    @property
    def known(self) -> bool:
        return not self.reason


def rung_multiplier(pairs: RungPairs, curve: BudgetCurve | None) -> RungMultiplier:
    """Log multipliers of the completed pairs of one rung; ``curve`` is the baseline's L(D) there."""
    completed = pairs.completed
    if not completed:
        return RungMultiplier(reason="no completed pair")
    if curve is None:
        return RungMultiplier(reason="the baseline has only one token budget at this rung")
    if not curve.resolved:
        return RungMultiplier(reason="the baseline's loss does not clearly fall over its token budgets")

    def mean_log(parameters: np.ndarray) -> float:
        return float(np.mean([log_tokens(pair, curve, parameters) for pair in completed]))

    needed = [log_tokens(pair, curve, curve.parameters) for pair in completed]
    tokens = [math.log(pair.arm.tokens) for pair in completed]
    logs = {"tokens": [a - b for a, b in zip(needed, tokens, strict=True)]}
    for cost in ("flops", "seconds"):
        logs[cost] = [
            log + math.log(getattr(pair.baseline_cost, cost) / getattr(pair.arm, cost))
            for log, pair in zip(logs["tokens"], completed, strict=True)
        ]
    reach = float(np.exp(np.mean(needed)))
    extrapolated = not curve.lowest * 0.995 <= reach <= curve.highest * 1.005
    return RungMultiplier(logs, curve.variance_of(mean_log), curve.df, extrapolated)


def log_tokens(pair: Pair, curve: BudgetCurve, parameters: np.ndarray) -> float:
    """log tokens the pair's baseline needs for the arm's loss, on the curve shifted through the pair's own baseline."""
    expected = float(np.exp(curve.log_loss(math.log(pair.arm.tokens), parameters)))
    return curve.log_tokens_for(pair.arm_loss * expected / pair.baseline_loss, parameters)


def pool(rungs: Sequence[RungMultiplier], cost: str) -> Estimate | None:
    """The log multiplier over all pairs of ``rungs`` as a t-interval, the errors of the rungs' curves added.

    None when no rung has a multiplier. The mean is geometric once exponentiated.
    """
    rungs = [rung for rung in rungs if rung.known]
    if not rungs:
        return None
    over_pairs = paired_t([log for rung in rungs for log in rung.logs[cost]])
    if over_pairs.se is None:
        return over_pairs
    parts = [(over_pairs.se**2, over_pairs.df)]
    for rung in rungs:
        if rung.fit_variance is None:  # the curve's error is unknown, and so is the multiplier's
            return Estimate(over_pairs.mean, None, 0, over_pairs.n)
        if rung.fit_variance > 0:
            parts.append((rung.fit_variance * (len(rung.logs[cost]) / over_pairs.n) ** 2, float(rung.fit_df)))
    return combine(over_pairs.mean, parts, over_pairs.n)


def as_factor(estimate: Estimate | None) -> tuple[float | None, list[float] | None]:
    """(multiplier, its interval) from the log scale."""
    if estimate is None:
        return None, None
    interval = estimate.interval
    if interval is None:
        return math.exp(estimate.mean), None
    return math.exp(estimate.mean), [_bounded_exp(value) for value in interval]


def _bounded_exp(value: float) -> float:
    """exp that stays inside JSON's numbers: an interval of one degree of freedom can be absurdly wide."""
    return math.exp(max(min(value, 300.0), -300.0))
