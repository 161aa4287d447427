"""What a study that runs through the ladder would cost: the ladder's own plan, before anything is trained."""

from __future__ import annotations

from pathlib import Path

from triscale.ladder.config import LadderConfig
from triscale.ladder.plan import plan_ladder
from triscale.ladder.run import LadderRunner
from triscale.ladder.tune import plan_tuning
from triscale.train.config import Runtime
from triscale.train.progress import Progress


def ladder_cost(ladders: list[LadderConfig], runtime: Runtime, *, tuned: bool = False) -> str:
    """Lines of every ladder's plan and their sum; prepares the corpora (to know vocabularies) and times one step of
    every arm at every rung. tuned: whether learning rates are tuned on the first rung before."""
    lines, minutes = [], 0.0
    for ladder in ladders:
        runner = LadderRunner(ladder, Path("not-written"), runtime)
        with Progress(f"{ladder.name}:") as progress:
            runner.preparing = progress.preparing
            plans = [("tuning (a best rate at the edge adds more):", plan_tuning(runner))] if tuned else []
            plans.append((f"ladder {ladder.name}:", plan_ladder(runner)))
        for title, plan in plans:
            lines += [title, *plan.lines(), ""]
            minutes += plan.minutes
    return "\n".join([*lines, f"together about {minutes:.0f} minutes on this machine"])
