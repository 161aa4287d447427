"""From a ladder's record to its verdicts: pair, estimate, correct for the number of arms, say one of three things."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .budget_curve import BudgetCurve, fit_budget_curve
from .fits import PowerLaw, fit_power_law
from .multiplier import RungMultiplier, pool, rung_multiplier
from .pairs import RungPairs, pair_rung
from .records import LadderRecord, Rung, same_budget
from .statistics import ALPHA, POWER, Estimate, holm, paired_t, smallest_detectable

Verdict = Literal["better", "worse", "no difference detected"]
RESOLUTION = 2**-23  # relative: losses are computed in fp32, smaller scatter is not believed


@dataclass(frozen=True)
class RungResult:
    """One arm at one rung. difference: nats per token, arm minus baseline, over all pairs (None without any)."""

    pairs: RungPairs
    difference: Estimate | None
    multiplier: RungMultiplier

    @property
    def rung(self) -> Rung:
        return self.pairs.rung


@dataclass(frozen=True)
class ArmResult:
    """One arm. pooled: difference over rungs; multipliers: cost -> log multiplier over rungs; detectable: the smallest
    difference in nats that the design finds with 80 % power; detectable_multiplier: the same as a token multiplier."""

    name: str
    rungs: tuple[RungResult, ...]
    pooled: Estimate | None
    multipliers: dict[str, Estimate | None]
    p_holm: float | None
    verdict: Verdict
    detectable: float | None
    detectable_multiplier: float | None
    scaling: PowerLaw | None

    @property
    def extrapolated(self) -> bool:
        return any(result.multiplier.extrapolated for result in self.rungs)

    @property
    def diverged(self) -> int:
        return sum(result.pairs.diverged_arm for result in self.rungs)

    @property
    def n(self) -> int:
        return sum(len(result.pairs.pairs) for result in self.rungs)


@dataclass(frozen=True)
class LadderResult:
    """Everything a report shows. curves: rung -> the baseline's L(D); scaling: the baseline's L(C) over rungs."""

    record: LadderRecord
    arms: tuple[ArmResult, ...]
    curves: dict[str, BudgetCurve | None]
    scaling: PowerLaw | None
    alpha: float
    power: float


def analyse(record: LadderRecord, alpha: float = ALPHA, power: float = POWER) -> LadderResult:
    """Judge every planned arm of ``record`` against its baseline."""
    curves = {rung.name: baseline_curve(record, rung) for rung in record.rungs}
    drafts = {arm: [_rung_result(record, arm, rung, curves[rung.name], alpha) for rung in record.rungs]
              for arm in record.arms}  # fmt: skip
    pooled = {arm: _pool_differences(results, alpha) for arm, results in drafts.items()}
    adjusted = holm({arm: estimate.p if estimate else None for arm, estimate in pooled.items()})
    arms = []
    for arm, results in drafts.items():
        estimate, tests = pooled[arm], len(record.arms)
        detectable = smallest_detectable(estimate, tests, power) if estimate else None
        arms.append(
            ArmResult(
                arm,
                tuple(results),
                estimate,
                {cost: pool([r.multiplier for r in results], cost) for cost in ("tokens", "flops", "seconds")},
                adjusted[arm],
                judge(estimate, adjusted[arm], alpha),
                detectable,
                _as_multiplier(detectable, results, curves),
                scaling_fit(record, arm),
            )
        )
    return LadderResult(record, tuple(arms), curves, scaling_fit(record, record.baseline), alpha, power)


def judge(estimate: Estimate | None, p_adjusted: float | None, alpha: float = ALPHA) -> Verdict:
    """One of three words. Without repetition nothing is detected, however large the difference looks."""
    if estimate is None or p_adjusted is None or p_adjusted >= alpha or estimate.mean == 0:
        return "no difference detected"
    return "better" if estimate.mean < 0 else "worse"


def baseline_curve(record: LadderRecord, rung: Rung) -> BudgetCurve | None:
    """The baseline's L(D) at ``rung`` from every complete schedule of every seed that did not diverge."""
    budgets: list[float] = []
    losses: dict[int, dict[float, float]] = {}
    for run in record.of(record.baseline, rung.name):
        if run.diverged:
            continue
        ends = [(budget.tokens, budget.loss) for budget in run.budgets] + [(run.tokens, run.loss)]
        for tokens, loss in ends:
            if loss is None:
                continue
            known = next((b for b in budgets if same_budget(b, tokens)), None)
            if known is None:
                budgets.append(known := float(tokens))
            losses.setdefault(run.seed, {})[known] = loss
    return fit_budget_curve(losses)


def scaling_fit(record: LadderRecord, arm: str) -> PowerLaw | None:
    """L(C) of one arm over the rungs, C the training FLOPs of a run; None below two rungs."""
    losses: dict[int, dict[float, float]] = {}
    for rung in record.rungs:
        runs = [run for run in record.of(arm, rung.name) if not run.diverged]
        if not runs:
            continue
        flops = float(sum(run.flops for run in runs) / len(runs))
        for run in runs:
            losses.setdefault(run.seed, {})[flops] = float(run.loss)  # type: ignore[arg-type]
    return fit_power_law(losses)


def _rung_result(record: LadderRecord, arm: str, rung: Rung, curve: BudgetCurve | None, alpha: float) -> RungResult:
    pairs = pair_rung(record, arm, rung)
    estimate = paired_t(pairs.differences, _resolution([pairs]), alpha) if pairs.pairs else None
    return RungResult(pairs, estimate, rung_multiplier(pairs, curve))


def _pool_differences(results: list[RungResult], alpha: float) -> Estimate | None:
    differences = [difference for result in results for difference in result.pairs.differences]
    return paired_t(differences, _resolution([r.pairs for r in results]), alpha) if differences else None


def _resolution(rungs: list[RungPairs]) -> float:
    losses = [pair.baseline_loss for rung in rungs for pair in rung.pairs]
    return RESOLUTION * max(losses, default=0.0)


def _as_multiplier(detectable: float | None, results: list[RungResult], curves: dict[str, BudgetCurve | None]):
    """A gain of ``detectable`` nats as a token multiplier on the baseline's curves (geometric mean over rungs)."""
    if detectable is None:
        return None
    logs = []
    for result in results:
        curve = curves[result.rung.name]
        if curve is None or not curve.resolved or not result.pairs.completed:
            continue
        tokens = result.pairs.completed[0].arm.tokens
        reached = float(curve.loss(float(tokens))) - detectable
        if reached > 0:
            logs.append(curve.log_tokens_for(reached) - math.log(tokens))
    if not logs or not all(map(math.isfinite, logs)):
        return None
    return math.exp(sum(logs) / len(logs))
