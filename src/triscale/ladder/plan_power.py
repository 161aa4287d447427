"""How many seeds a wanted effect needs, before anything is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats

from triscale.config import ConfigError

from .pairs import pair_rung
from .records import LadderRecord
from .statistics import ALPHA, POWER, detectable_shift, pooled_deviation, power_of

MOST_SEEDS = 1000


@dataclass(frozen=True)
class SeedPlan:
    """seeds: the smallest number that reaches the power; reached: the power at that number. None: more than 1,000."""

    effect: float
    pair_sd: float
    seeds: int | None
    reached: float


@dataclass(frozen=True)
class Observed:
    """The standard deviation of paired loss differences (nats per token) in a record, with its 95 % upper limit."""

    pair_sd: float
    upper: float
    df: int


def observed_pair_sd(record: LadderRecord) -> Observed | None:
    """Pooled over arms and rungs from the pairs that completed; None without any repetition.

    A deviation from few pairs is itself uncertain: ``upper`` (chi-squared) is what a careful plan uses.
    """
    groups = [[pair.difference for pair in pair_rung(record, arm, rung).completed]
              for arm in record.arms for rung in record.rungs]  # fmt: skip
    deviation, df = pooled_deviation(groups)
    if df == 0:
        return None
    return Observed(deviation, deviation * math.sqrt(df / float(stats.chi2.ppf(0.05, df))), df)


def nats_of(multiplier: float, exponent: float, loss: float, floor: float = 0.0) -> float:
    """The loss difference (nats per token) that a token ``multiplier`` is worth where L = a·D^-exponent + floor."""
    if multiplier <= 0:
        raise ConfigError("effect", f"a multiplier must be positive, got {multiplier}")
    return (loss - floor) * (1 - multiplier**-exponent)


def power_with(seeds: int, effect: float, pair_sd: float, rungs: int = 1, arms: int = 1, alpha: float = ALPHA) -> float:
    """Probability that ``effect`` (nats per token, on every rung) gets its verdict; a lower bound under Holm."""
    df = rungs * seeds - 1
    if df < 1:
        return 0.0
    return power_of(abs(effect) / (pair_sd / math.sqrt(seeds * rungs)), df, alpha / max(arms, 1))


def seeds_needed(
    effect: float, pair_sd: float, rungs: int = 1, arms: int = 1, alpha: float = ALPHA, power: float = POWER
) -> SeedPlan:
    """The smallest number of seeds per rung that finds ``effect`` (nats per token) with probability ``power``.

    pair_sd: standard deviation of one paired difference. Raises :class:`ConfigError` for an effect of zero or a
    deviation that is not positive.
    """
    for name, value in (("effect", effect), ("pair_sd", pair_sd)):
        if not value or not math.isfinite(value) or (name == "pair_sd" and value < 0):
            raise ConfigError(name, f"must be a finite number other than zero, got {value}")
    # The normal approximation is a lower bound on the seeds: start there and step up.
    shift = detectable_shift(1e6, alpha / max(arms, 1), power)
    seeds = max(2, math.floor((shift * pair_sd / abs(effect)) ** 2 / rungs))
    while seeds <= MOST_SEEDS:
        reached = power_with(seeds, effect, pair_sd, rungs, arms, alpha)
        if reached >= power:
            return SeedPlan(effect, pair_sd, seeds, reached)
        seeds += 1
    return SeedPlan(effect, pair_sd, None, power_with(MOST_SEEDS, effect, pair_sd, rungs, arms, alpha))
