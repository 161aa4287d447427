"""Learning rates tuned per arm, on the smallest rung or on every one, so that no baseline is a straw man.

The grid is searched from its middle outwards and extended while the best rate lies on its edge; every run is kept and
recorded, and the result names the seed and budget it was found with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from triscale.config import ConfigError, TriScaleError
from triscale.train.config import Runtime
from triscale.train.progress import Progress
from triscale.train.run_directory import environment, write_json

from .config import ArmConfig, LadderConfig, RungConfig
from .plan import LadderPlan, plan_cell
from .run import Cell, LadderRunner

MAX_EXTENSIONS = 3


def tune(
    ladder: LadderConfig,
    folder: Path,
    runtime: Runtime,
    progress: Progress,
    arms: tuple[str, ...] = (),
    rungs: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Sweep ``ladder.rates`` for each arm on the first rung (or ``rungs``) with the first seed.

    Returns and saves the record (``tuning.json``): per rung and arm the loss at every rate tried, the best rate, and
    whether it lies inside the grid. :func:`with_rates` applies it. Runs done before are not repeated.
    """
    where, chosen = _chosen(ladder, arms, rungs)
    runner = LadderRunner(ladder, folder, runtime)
    runner.preparing = progress.preparing
    path, seed = folder / "tuning.json", ladder.seeds[0]
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rungs": {}}
    record |= {"ladder": ladder.name, "seed": seed, "environment": environment()}
    for rung in where:
        tokens = round(rung.tokens * ladder.tune_fraction)
        results = record["rungs"].setdefault(rung.name, {"tokens": tokens, "arms": {}})
        for arm in chosen:
            losses = _sweep(runner, rung, arm, tokens, progress)
            rates, best = sorted(losses), min(losses, key=lambda r: losses[r])
            if losses[best] == float("inf"):
                raise TriScaleError(
                    f"{arm.name} diverged at every rate ({rates[0]:g} to {rates[-1]:g}): set lower `rates`"
                )
            results["arms"][arm.name] = {
                "losses": {f"{r:g}": (losses[r] if losses[r] < float("inf") else None) for r in rates},
                "best": best,
                "inside": best not in (rates[0], rates[-1]),
            }
            write_json(path, record)
    return record


def plan_tuning(runner: LadderRunner, arms: tuple[str, ...] = (), rungs: tuple[str, ...] = ()) -> LadderPlan:
    """What one rate of each arm costs, and the whole grid; extensions of the grid come on top."""
    ladder, rows = runner.ladder, []
    where, chosen = _chosen(ladder, arms, rungs)
    for rung in where:
        tokens = round(rung.tokens * ladder.tune_fraction)
        rows += [plan_cell(runner, Cell(rung, arm, ladder.seeds[0], (tokens,)), tokens) for arm in chosen]
    return LadderPlan(tuple(rows), len(ladder.rates), len(ladder.rates) * sum(row.minutes for row in rows), "rate")


def _chosen(
    ladder: LadderConfig, arms: tuple[str, ...], rungs: tuple[str, ...]
) -> tuple[list[RungConfig], list[ArmConfig]]:
    """The named rungs (none = the first) and arms (none = all); raises :class:`ConfigError` for an unknown name."""
    for option, names, known in (("--arm", arms, ladder.arms), ("--rung", rungs, ladder.rungs)):
        there = [item.name for item in known]
        for name in names:
            if name not in there:
                raise ConfigError(option, f"{name!r} is not in the ladder", f"Known: {', '.join(there)}")
    where = [ladder.rung(name) for name in rungs] or [ladder.rungs[0]]
    return where, [ladder.arm(name) for name in arms] or list(ladder.arms)


def _sweep(
    runner: LadderRunner, rung: RungConfig, arm: ArmConfig, tokens: int, progress: Progress
) -> dict[float, float]:
    """Rate -> held-out loss (infinite where it diverged), the grid extended while its edge is best."""
    seed, losses = runner.ladder.seeds[0], {}

    def measure(rate: float) -> None:
        progress.title = f"{rung.name} {arm.name} lr {rate:g}"
        cell = Cell(rung, replace(arm, learning_rate=rate, learning_rates={}), seed, (tokens,))
        folder = runner.folder / rung.name / arm.name / f"lr{rate:g}"
        loss = runner.train(runner.trainer(cell, folder, tokens, (progress,), ()))["loss"]
        losses[rate] = float("inf") if loss is None else loss
        progress.note(f"{rung.name}, {arm.name}: lr {rate:g} -> {losses[rate]:.4f}")

    for rate in runner.ladder.rates:
        measure(rate)
    for _ in range(MAX_EXTENSIONS):
        rates, best = sorted(losses), min(losses, key=lambda r: losses[r])
        ratio = rates[1] / rates[0] if len(rates) > 1 else 3.0
        if best == rates[0]:
            measure(best / ratio)
        elif best == rates[-1]:
            measure(best * ratio)
        else:
            break
    return losses


def with_rates(ladder: LadderConfig, record: dict[str, Any]) -> LadderConfig:
    """``ladder`` with each arm's learning rates from a tuning record."""
    arms = []
    for arm in ladder.arms:
        found = {
            rung: row["arms"][arm.name]["best"] for rung, row in record["rungs"].items() if arm.name in row["arms"]
        }
        first = found.get(ladder.rungs[0].name, arm.learning_rate)
        arms.append(replace(arm, learning_rate=first, learning_rates={**arm.learning_rates, **found}))
    return replace(ladder, arms=tuple(arms))
