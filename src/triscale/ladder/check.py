"""Does the ladder's own statistics keep its word? Simulate whole ladders from the noise of recorded ones.

Noise is resampled from the record's residuals with random signs, smoothed by a normal kernel that keeps their variance:
a plain bootstrap of a handful of residuals would draw equal pairs, and with them impossible certainty. Every simulated
ladder goes through the same :func:`analyse` as a real one: pairing, fit, multiplier, Holm, verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import optimize, stats

from triscale.config import TriScaleError

from .budget_curve import BudgetCurve
from .pairs import pair_rung
from .records import Budget, LadderRecord, RunSummary
from .statistics import ALPHA, POWER, detectable_shift, power_of
from .verdict import analyse, baseline_curve


@dataclass(frozen=True)
class Rate:
    """How often something happened in the simulated ladders, and how often it should. interval: Clopper-Pearson."""

    name: str
    count: int
    trials: int
    expected: float

    @property
    def rate(self) -> float:
        return self.count / self.trials if self.trials else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        ends = stats.binomtest(self.count, self.trials).proportion_ci(0.95) if self.trials else (0.0, 1.0)
        return float(ends[0]), float(ends[1])


@dataclass(frozen=True)
class CheckResult:
    """false_verdicts: ladders without any effect in which some arm got a verdict. found: ladders in which the planted
    arm was called better; missed_sign: called worse. covered: multiplier intervals that hold the planted multiplier."""

    effect: float
    effect_nats: float
    false_verdicts: Rate
    found: Rate
    missed_sign: Rate
    covered: Rate

    def to_dict(self) -> dict[str, Any]:
        rates = {name: getattr(self, name) for name in ("false_verdicts", "found", "missed_sign", "covered")}
        return {"effect": self.effect, "effect_nats": self.effect_nats} | {
            name: {"rate": rate.rate if rate.trials else None, "ci": list(rate.interval), "trials": rate.trials,
                   "expected": rate.expected}
            for name, rate in rates.items()
        }  # fmt: skip

    def lines(self) -> list[str]:
        """One line a rate, for people."""
        head = f"planted effect: x{self.effect:.3f} tokens ({self.effect_nats:.4f} nats per token)"
        return [head] + [
            f"{rate.name}: {rate.rate:.1%} [{rate.interval[0]:.1%}, {rate.interval[1]:.1%}] of {rate.trials}, "
            f"expected {rate.expected:.1%}"
            for rate in (self.false_verdicts, self.found, self.missed_sign, self.covered)
        ]


class NoiseModel:
    """Residuals of a record, on the log-loss scale, and a way to draw from them; each rung keeps its own amount."""

    def __init__(self, record: LadderRecord):
        self.record = record
        self.curves = {rung.name: self._curve(rung) for rung in record.rungs}
        pairs, seeds, branches = [], [], []
        self.scale: dict[str, float] = {}  # rung -> standard deviation of a pair's log loss ratio
        for rung in record.rungs:
            own: list[float] = []
            for arm in record.arms:
                logs = [math.log(p.arm_loss / p.baseline_loss) for p in pair_rung(record, arm, rung).completed]
                own += _centred(logs)
            if any(own):
                self.scale[rung.name] = math.sqrt(sum(value**2 for value in own) / len(own))
                pairs += [value / self.scale[rung.name] for value in own]
            tables = [_branch_residuals(run, self.curves[rung.name])
                      for run in record.of(record.baseline, rung.name) if not run.diverged]  # fmt: skip
            seeds += _centred([float(np.mean(table)) for table in tables])
            branches += [value for table in tables for value in _centred(list(table))]
        if not pairs:
            raise TriScaleError("the check needs an arm with two finished pairs at one rung to know the noise")
        typical = float(np.mean(list(self.scale.values())))
        self.scale |= {rung.name: typical for rung in record.rungs if rung.name not in self.scale}
        self.pairs, self.seeds, self.branches = map(np.array, (pairs, seeds, branches))

    def _curve(self, rung) -> BudgetCurve:
        curve = baseline_curve(self.record, rung)
        if curve is None:
            raise TriScaleError(f"the check needs baseline runs at two token budgets; rung {rung.name} has fewer")
        return curve

    def draw(self, random: np.random.Generator, effect: float) -> LadderRecord:
        """A ladder of the record's design in which the first arm is worth ``effect`` x tokens and the rest nothing."""
        record, runs = self.record, []
        for rung in record.rungs:
            template = _template(record, rung.name)
            curve = self.curves[rung.name]
            for seed in record.seeds:
                luck = math.exp(_smooth(random, self.seeds))
                own = float(curve.loss(template.tokens)) * luck
                ends = tuple(
                    replace(end, loss=own if end.tokens == template.tokens
                            else float(curve.loss(end.tokens)) * luck * math.exp(_smooth(random, self.branches)))
                    for end in template.budgets
                )  # fmt: skip
                runs.append(replace(template, seed=seed, loss=own, budgets=ends))
                for index, arm in enumerate(record.arms):
                    worth = effect if index == 0 else 1.0
                    noise = self.scale[rung.name] * _smooth(random, self.pairs)
                    loss = float(curve.loss(template.tokens * worth)) * luck * math.exp(noise)
                    runs.append(replace(template, arm=arm, seed=seed, loss=loss, budgets=()))
        return replace(record, runs=tuple(runs))

    def saved(self, effect: float) -> np.ndarray:
        """The loss that an effect of ``effect`` x tokens saves on every rung, nats per token."""
        curves = [(self.curves[rung.name], rung.tokens) for rung in self.record.rungs]
        return np.array([float(curve.loss(tokens) - curve.loss(tokens * effect)) for curve, tokens in curves])

    def shift(self, effect: float) -> float:
        """The mean effect in standard errors of the design; its spread over the rungs counts as noise, as in a verdict."""
        saved, seeds = self.saved(effect), len(self.record.seeds)
        losses = [float(self.curves[rung.name].loss(rung.tokens)) for rung in self.record.rungs]
        noise = np.array(losses) * [self.scale[rung.name] for rung in self.record.rungs]
        pairs = len(saved) * seeds
        variance = float((noise**2).mean()) + seeds * float(((saved - saved.mean()) ** 2).sum()) / (pairs - 1)
        return float(saved.mean()) / math.sqrt(variance / pairs)

    @property
    def df(self) -> int:
        return len(self.record.rungs) * len(self.record.seeds) - 1


def check_statistics(
    record: LadderRecord, *, effect: float | None = None, trials: int = 400, seed: int = 0, alpha: float = ALPHA,
    power: float = POWER, progress: Callable[[int, int], None] | None = None,
) -> CheckResult:  # fmt: skip
    """Simulate ``trials`` ladders without an effect and as many with one planted.

    effect: the planted token multiplier; by default the smallest one that this design should find with probability
    ``power``. progress: called with (done, total). Raises :class:`TriScaleError` when the record cannot supply the
    noise.
    """
    model = NoiseModel(record)
    tests = len(record.arms)
    if effect is None:
        effect = _smallest_effect(model, detectable_shift(model.df, alpha / tests, power))
    expected = power_of(model.shift(effect), model.df, alpha / tests)
    random = np.random.default_rng(seed)
    false = found = wrong = covered = intervals = 0
    for trial in range(trials):
        null = analyse(model.draw(random, 1.0), alpha, power)
        false += any(arm.verdict != "no difference detected" for arm in null.arms)
        planted = analyse(model.draw(random, effect), alpha, power).arms[0]
        found += planted.verdict == "better"
        wrong += planted.verdict == "worse"
        estimate = planted.multipliers["tokens"]
        if estimate is not None and estimate.interval is not None:
            intervals += 1
            covered += estimate.interval[0] <= math.log(effect) <= estimate.interval[1]
        if progress is not None:
            progress(trial + 1, trials)
    return CheckResult(
        effect,
        float(model.saved(effect).mean()),
        Rate("false verdicts without an effect", false, trials, alpha),
        Rate("planted effect found", found, trials, expected),
        Rate("planted effect called worse", wrong, trials, 0.0),
        Rate("multiplier intervals that hold the truth", covered, intervals, 1 - alpha),
    )


def _smallest_effect(model: NoiseModel, wanted: float) -> float:
    """The smallest multiplier whose shift reaches ``wanted``."""
    grid = np.geomspace(1.001, 1000, 400)
    enough = next((i for i, effect in enumerate(grid) if model.shift(float(effect)) >= wanted), None)
    if enough is None:
        raise TriScaleError("no multiplier is large enough for this design to find: its noise exceeds what tokens buy")
    low = float(grid[enough - 1]) if enough else 1.0
    return float(optimize.brentq(lambda effect: model.shift(effect) - wanted, low, float(grid[enough])))


def _template(record: LadderRecord, rung: str) -> RunSummary:
    run = next(run for run in record.of(record.baseline, rung) if not run.diverged)
    bare = replace(run, curve=(), grad_norm_curve=(), max_logit_curve=())
    if any(end.tokens == run.tokens for end in run.budgets):
        return bare
    own = Budget(tokens=run.tokens, flops=run.flops, seconds=run.seconds, loss=run.loss)
    return replace(bare, budgets=(*bare.budgets, own))


def _branch_residuals(run: RunSummary, curve: BudgetCurve) -> np.ndarray:
    ends = [(end.tokens, end.loss) for end in run.budgets if end.loss is not None]
    return np.array([math.log(loss / float(curve.loss(tokens))) for tokens, loss in ends])


def _centred(values: list[float]) -> list[float]:
    """Deviations from the mean, scaled so that their mean square is the unbiased variance."""
    n = len(values)
    if n < 2:
        return []
    mean = sum(values) / n
    return [(value - mean) * math.sqrt(n / (n - 1)) for value in values]


def _smooth(random: np.random.Generator, residuals: np.ndarray) -> float:
    """One smoothed residual of random sign: variance kept, mean zero (Silverman's rule for the kernel's width)."""
    if len(residuals) == 0:
        return 0.0
    width = (4 / (3 * len(residuals))) ** 0.2
    spread = math.sqrt(float(residuals @ residuals) / len(residuals))
    value = residuals[random.integers(len(residuals))] * (1 if random.random() < 0.5 else -1)
    return float((value + width * spread * random.standard_normal()) / math.sqrt(1 + width**2))
