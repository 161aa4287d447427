"""Learning rates tuned per arm on the smallest rung, so that no baseline is a straw man.

The grid is searched from its middle outwards and extended while the best rate lies on its edge; every run is kept and
recorded, and the result names the seed and budget it was found with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from triscale.train.config import Runtime
from triscale.train.progress import Progress
from triscale.train.run_directory import environment, write_json

from .config import ArmConfig, LadderConfig
from .run import Cell, LadderRunner

MAX_EXTENSIONS = 3


def tune(
    ladder: LadderConfig, folder: Path, runtime: Runtime, progress: Progress, arms: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Sweep ``ladder.rates`` for each arm on the first rung with the first seed; returns and saves the record.

    The record (``tuning.json``): per arm the loss at every rate tried, the best rate, and whether it lies inside the
    grid. Rates are applied with :func:`with_rates`.
    """
    runner = LadderRunner(ladder, folder, runtime)
    runner.preparing = progress.preparing
    rung, seed = ladder.rungs[0], ladder.seeds[0]
    tokens = round(rung.tokens * ladder.tune_fraction)
    record: dict[str, Any] = {"ladder": ladder.name, "rung": rung.name, "seed": seed, "tokens": tokens, "arms": {}}
    record["environment"] = environment()
    earlier = folder / "tuning.json"
    if arms and earlier.exists():  # a sweep of some arms keeps what is known of the others
        record["arms"] = json.loads(earlier.read_text())["arms"]
    chosen = [a for a in ladder.arms if not arms or a.name in arms]
    for number, arm in enumerate(chosen):
        losses: dict[float, float] = {}

        def measure(
            rate: float, arm: ArmConfig = arm, losses: dict[float, float] = losses, number: int = number
        ) -> None:
            progress.title = f"[{number + 1}/{len(chosen)}] {arm.name} lr {rate:g}"
            cell = Cell(rung, replace(arm, learning_rate=rate), seed, (tokens,))
            trainer = runner._trainer(cell, folder / arm.name / f"lr{rate:g}", tokens, (progress,), ())
            loss = runner._train(trainer)["loss"]
            losses[rate] = float("inf") if loss is None else loss
            progress.note(f"{arm.name}: lr {rate:g} -> {losses[rate]:.4f}")

        for rate in ladder.rates:
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
        rates, best = sorted(losses), min(losses, key=lambda r: losses[r])
        record["arms"][arm.name] = {
            "losses": {f"{r:g}": (losses[r] if losses[r] < float("inf") else None) for r in rates},
            "best": best,
            "inside": best not in (rates[0], rates[-1]),
        }
        write_json(folder / "tuning.json", record)
    return record


def with_rates(ladder: LadderConfig, record: dict[str, Any]) -> LadderConfig:
    """``ladder`` with each arm's learning rate from a tuning record."""
    arms = tuple(
        replace(arm, learning_rate=record["arms"][arm.name]["best"]) if arm.name in record["arms"] else arm
        for arm in ladder.arms
    )
    return replace(ladder, arms=arms)
