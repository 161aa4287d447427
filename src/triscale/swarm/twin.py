"""The single-agent twin: the same task, tools, limits and model with nobody to delegate to, put side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import ConfigError
from .ledger import Ledger
from .limits import Limits
from .metrics import Metrics, measure
from .orchestrator import Swarm
from .types import ModelClient

REMARK = "One pair of runs of a sampling model is an anecdote: repeat it before believing a difference."
SLACK = 0.05  # differences below 5 % are called equal


@dataclass(frozen=True)
class Side:
    """One of the two runs. score: numbers about the answer by name, empty when it cannot be scored."""

    name: str
    mode: str
    outcome: str | None
    answer: str
    score: Mapping[str, float]
    metrics: Metrics

    @classmethod
    def of(cls, ledger: Ledger, score: Callable[[str], Mapping[str, float]] | None) -> Side:
        run = ledger.run
        answer = run["text"] or ""
        return cls(run["name"], run["mode"], run["outcome"], answer, score(answer) if score else {}, measure(ledger))

    def numbers(self) -> dict[str, float]:
        m = self.metrics
        quality = next((v for k, v in self.score.items() if k in ("item_f1", "score")), None)
        values: dict[str, float] = {**self.score, "seconds": m.makespan, "critical steps": m.critical_steps_turns,
                                    "steps in all": m.total_steps, "model calls": m.model_calls,
                                    "tool calls": m.tool_calls, "tokens in": m.tokens_in,
                                    "of them cached": m.tokens_cached, "tokens out": m.tokens_out, "cost": m.cost,
                                    "sub-agents": m.assigned, "most at work": m.peak_concurrency}  # fmt: skip
        if quality and m.cost:
            values["cost per quality"] = m.cost / quality
        return values


@dataclass(frozen=True)
class Comparison:
    """The swarm and its twin."""

    swarm: Side
    single: Side

    @property
    def speed_up(self) -> float | None:
        """The twin's time divided by the swarm's."""
        return self.single.metrics.makespan / self.swarm.metrics.makespan if self.swarm.metrics.makespan else None

    def verdict(self) -> list[str]:
        """What the numbers say, in sentences; says nothing about quality that was not scored."""
        said = []
        for side in (self.swarm, self.single):
            if side.outcome != "completed":
                said.append(
                    f"The {side.mode} run ended as {side.outcome or 'unfinished'}: its numbers are of a partial run."
                )
        a, b = self.swarm.metrics, self.single.metrics
        faster = _ratio(b.makespan, a.makespan)
        dearer, unit = (_ratio(a.cost, b.cost), "cost") if b.cost else (_ratio(_tokens(a), _tokens(b)), "tokens")
        if faster is not None and dearer is not None:
            said.append(f"The swarm took {1 / faster:.2f} of the single agent's time ({faster:.2f}x as fast) and "
                        f"{dearer:.2f} of its {unit}.")  # fmt: skip
        metric = next((name for name in self.swarm.score if name in self.single.score), None)
        better = None
        if metric is not None:
            ours, other = self.swarm.score[metric], self.single.score[metric]
            better = ours - other
            said.append(f"{metric}: {ours:.3f} with the swarm, {other:.3f} alone.")
        no_faster = faster is not None and faster < 1 + SLACK
        no_better = better is None or better <= 1e-9
        if a.assigned and no_better and (no_faster or (better is not None and better < -SLACK)):
            what = "no faster" if no_faster else "faster, but the answer is worse"
            price = f", and {dearer:.1f}x the {unit}" if dearer and dearer > 1 + SLACK else ""
            said.append(f"Spawning did not pay here: {what}{price}.")
        return said

    def to_dict(self) -> dict[str, Any]:
        ours, other = self.swarm.numbers(), self.single.numbers()
        numbers = {name: {"swarm": ours.get(name), "single": other.get(name),
                          "ratio": _ratio(ours.get(name), other.get(name))} for name in {**ours, **other}}  # fmt: skip
        return {"swarm": self.swarm.name, "single": self.single.name, "numbers": numbers, "verdict": self.verdict(),
                "speed_up": self.speed_up, "remark": REMARK}  # fmt: skip


def compare_runs(
    first: str | Path, second: str | Path, score: Callable[[str], Mapping[str, float]] | None = None
) -> Comparison:
    """Compare two recorded runs of one task, one of them a single agent's. Raises :class:`ConfigError` otherwise."""
    ledgers = [Ledger.of_run(first), Ledger.of_run(second)]
    by_mode = {ledger.run["mode"]: ledger for ledger in ledgers}
    if set(by_mode) != {"swarm", "single"}:
        modes = " and ".join(str(ledger.run["mode"]) for ledger in ledgers)
        raise ConfigError("runs", f"their modes are {modes}", "Give one swarm run and one run with --single")
    if ledgers[0].run["task"] != ledgers[1].run["task"]:
        raise ConfigError("runs", "they answer different tasks", "Compare runs of the same question")
    return Comparison(Side.of(by_mode["swarm"], score), Side.of(by_mode["single"], score))


async def run_twins(
    swarm: Swarm, task: str, *, single_client: ModelClient | None = None, directory: Path,
    score: Callable[[str], Mapping[str, float]] | None = None,
) -> Comparison:  # fmt: skip
    """Run ``task`` with ``swarm`` and then with its twin, into ``directory/swarm`` and ``directory/single``.

    The twin has the same client (or ``single_client``), tools, limits and sampling; only its step limit is raised to
    what the orchestrator and one sub-agent of each stage may take together. A run that is already there is finished,
    not repeated. Clients and tools are closed at the end.
    """
    close = swarm.close_clients
    main = replace(swarm, directory=directory / "swarm", mode="swarm", close_clients=False)
    twin = replace(
        swarm, client=single_client or swarm.client, subagent_client=None, directory=directory / "single",
        mode="single", limits=twin_limits(swarm.limits), close_clients=False,
    )  # fmt: skip
    try:
        await main.run(task)
        await twin.run(task)
    finally:
        if close:
            things = (swarm.client, swarm.subagent_client, single_client, *swarm.tools, *(swarm.subagent_tools or ()))
            for thing in {id(t): t for t in things if t is not None}.values():
                await thing.close()
    return compare_runs(directory / "swarm", directory / "single", score)


def twin_limits(limits: Limits) -> Limits:
    """The twin's limits: as given, but as many steps as the longest chain of a swarm, which is each of the
    orchestrator's with a whole sub-agent behind it. Tokens, money and time stay the same."""
    return replace(limits, orchestrator_steps=limits.orchestrator_steps * (1 + limits.subagent_steps))


def _tokens(metrics: Metrics) -> int:
    return metrics.tokens_in + metrics.tokens_out


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
