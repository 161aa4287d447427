"""What a ladder will cost and what it will be able to see, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triscale.train.plan import Plan
from triscale.train.plan import plan as plan_run

from .run import Cell, LadderRunner


@dataclass(frozen=True)
class CellPlan:
    """One arm at one rung; minutes are for one seed, decay branches included. tokens, flops: of the rung's own run."""

    rung: str
    arm: str
    parameters: int
    mismatch: float
    tokens: int
    flops: int
    memory_bytes: int
    minutes: float


@dataclass(frozen=True)
class LadderPlan:
    """rows: one a rung and arm. seeds: runs of each (``unit`` says of what). minutes: everything, one after another."""

    rows: tuple[CellPlan, ...]
    seeds: int
    minutes: float
    unit: str = "seed"

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [row.__dict__ for row in self.rows], "seeds": self.seeds, "minutes": self.minutes}

    def lines(self) -> list[str]:
        from triscale.train.progress import short_number, short_time

        head = f"{'rung':<10}{'arm':<20}{'parameters':>13}{'mismatch':>9}{'tokens':>11}{'FLOPs':>8}{'memory':>10}{'time/' + self.unit:>11}"
        body = [
            f"{r.rung:<10}{r.arm:<20}{r.parameters:>13,}{r.mismatch:>+9.2%}{r.tokens:>11,}{short_number(r.flops):>8}"
            f"{r.memory_bytes / 2**30:>6.2f} GiB{short_time(60 * r.minutes):>11}"
            for r in self.rows
        ]
        total = f"{self.seeds} {self.unit}(s): about {self.minutes:.0f} minutes of training on this machine"
        return [head, *body, total]


def plan_ladder(runner: LadderRunner) -> LadderPlan:
    """Time one micro-batch of every arm at every rung (parameters, FLOPs and tokens are exact)."""
    rows = []
    for rung in runner.ladder.rungs:
        for arm in runner.ladder.arms:
            rows.append(plan_cell(runner, next(c for c in runner.cells() if c.rung is rung and c.arm is arm)))
    seeds = len(runner.ladder.seeds)
    return LadderPlan(tuple(rows), seeds, seeds * sum(row.minutes for row in rows))


def plan_cell(runner: LadderRunner, cell: Cell, tokens: int | None = None) -> CellPlan:
    """One cell; tokens: of its own run, None = the rung's."""
    planned: Plan = plan_run(runner.config(cell, tokens), runner.runtime)
    share = _trained_tokens(runner, cell) / planned.tokens
    return CellPlan(
        cell.rung.name, cell.arm.name, planned.parameters["total"], runner.matched(cell.rung, cell.arm).mismatch,
        planned.tokens, planned.flops, planned.memory_bytes, planned.minutes * share,
    )  # fmt: skip


def _trained_tokens(runner: LadderRunner, cell: Cell) -> int:
    """Tokens actually trained: the trunk, and the decay of each shorter budget."""
    batch = runner.config(cell).train.batch_tokens
    longest = max(cell.budgets)
    decays = sum(tokens - batch * runner.branch_step(cell, tokens) for tokens in cell.budgets if tokens != longest)
    return longest + decays
