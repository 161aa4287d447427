"""Which runs may be compared: pairs of one arm and the baseline at the same rung, seed, tokens and corpus.

Nothing is dropped in silence: missing, refused and diverged pairs are listed beside the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .records import Budget, LadderRecord, Rung, RunSummary

TOLERANCE = 0.02  # relative difference of a matched quantity from which a mismatch is printed
REFUSAL = 0.10  # and from which the comparison is refused
_MATCHED: dict[str, Callable[[RunSummary], float]] = {
    "parameters": lambda run: run.parameters,
    "active": lambda run: run.parameters_active or run.parameters,
    "flops": lambda run: run.flops,
}


@dataclass(frozen=True)
class Pair:
    """An arm's run and the baseline's, at the arm's tokens. charged: a diverged side is scored as untrained."""

    seed: int
    arm: RunSummary
    baseline: RunSummary
    arm_loss: float
    baseline_loss: float
    baseline_cost: Budget
    charged: bool

    @property
    def difference(self) -> float:
        """Held-out nats per token, arm minus baseline: negative is better."""
        return self.arm_loss - self.baseline_loss


@dataclass(frozen=True)
class RungPairs:
    """All pairs of one arm at one rung, and why others are absent."""

    rung: Rung
    pairs: tuple[Pair, ...]
    missing: tuple[int, ...] = ()
    refused: tuple[str, ...] = ()
    mismatch: tuple[str, ...] = ()
    diverged_arm: int = 0
    diverged_baseline: int = 0

    @property
    def completed(self) -> tuple[Pair, ...]:
        """The pairs in which neither side diverged."""
        return tuple(pair for pair in self.pairs if not pair.charged)

    @property
    def differences(self) -> list[float]:
        return [pair.difference for pair in self.pairs]


def pair_rung(record: LadderRecord, arm: str, rung: Rung) -> RungPairs:
    """Pair ``arm`` with the baseline at ``rung``; every planned seed ends up in exactly one of the lists."""
    pairs, missing, refused = [], [], []
    for seed in record.seeds:
        run, base = record.find(arm, rung.name, seed), record.find(record.baseline, rung.name, seed)
        if run is None or base is None:
            missing.append(seed)
            continue
        made = _make_pair(record, rung, run, base)
        if isinstance(made, str):
            refused.append(f"seed {seed}: {made}")
        else:
            pairs.append(made)
    return RungPairs(
        rung,
        tuple(pairs),
        tuple(missing),
        tuple(refused),
        tuple(_mismatches(rung, pairs)),
        sum(pair.arm.diverged for pair in pairs),
        sum(pair.baseline.diverged for pair in pairs),
    )


def _make_pair(record: LadderRecord, rung: Rung, run: RunSummary, base: RunSummary) -> Pair | str:
    if run.corpus_hash != base.corpus_hash:
        return f"different corpora ({run.corpus_hash[:12]} against {base.corpus_hash[:12]})"
    cost = base.at(run.tokens)
    if cost is None:
        return f"the baseline has no complete schedule of {run.tokens:,} tokens (it has {base.tokens:,})"
    if rung.match in _MATCHED:
        measure = _MATCHED[rung.match]
        ratio = measure(run) / (cost.flops if rung.match == "flops" else measure(base))
        if abs(ratio - 1) > REFUSAL:
            return f"unmatched compute: {rung.match} x{ratio:.2f} of the baseline's"
    base_diverged = base.diverged or cost.loss is None
    untrained = _untrained(record, rung, run, base)
    arm_loss = run.loss if not run.diverged else _charge(run.loss, untrained)
    base_loss = cost.loss if not base_diverged else _charge(cost.loss, untrained)
    if arm_loss is None or base_loss is None:
        return "diverged, and no loss of the untrained model is on record to charge it with"
    base = replace(base, diverged=base_diverged)
    return Pair(run.seed, run, base, arm_loss, base_loss, cost, run.diverged or base_diverged)


def _charge(loss: float | None, untrained: float | None) -> float | None:
    """A diverged run counts as untrained, or as what it ended at if that is worse. Leaving it out would flatter it."""
    return max((value for value in (loss, untrained) if value is not None), default=None)


def _untrained(record: LadderRecord, rung: Rung, run: RunSummary, base: RunSummary) -> float | None:
    if not (run.diverged or base.diverged or None in [b.loss for b in base.budgets]):
        return None
    own = [run.untrained_loss(), base.untrained_loss()]
    if own == [None, None]:
        own = [other.untrained_loss() for other in record.runs if other.rung == rung.name]
    return max((value for value in own if value is not None), default=None)


def _mismatches(rung: Rung, pairs: list[Pair]) -> list[str]:
    """What differs by more than the tolerance, in words; ``match = "none"`` promises nothing but hides nothing."""
    if not pairs:
        return []
    ratios = {
        "parameters": [p.arm.parameters / p.baseline.parameters for p in pairs],
        "active parameters": [_MATCHED["active"](p.arm) / _MATCHED["active"](p.baseline) for p in pairs],
        "FLOPs": [p.arm.flops / p.baseline_cost.flops for p in pairs],
    }
    promised = {"parameters": ("parameters",), "active": ("active parameters",), "flops": ("FLOPs",),
                "none": ("parameters", "FLOPs")}[rung.match]  # fmt: skip
    worst = {name: max(values, key=lambda ratio: abs(ratio - 1)) for name, values in ratios.items()}
    return [f"{name} x{worst[name]:.2f}" for name in promised if abs(worst[name] - 1) > TOLERANCE]
