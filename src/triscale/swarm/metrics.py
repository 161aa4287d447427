"""What a run's ledger says about time and steps: critical steps, critical path and its bounds, utilisation, speed-up.

An episode is a chain of stages; a stage is one acting turn of an agent: its own calls, and the sub-agents launched with
them, which run side by side. Then (arXiv 2602.02276, section 3)

    CriticalSteps = sum over stages of (own steps + longest sub-agent's steps)
    critical path = sum over stages of (model seconds + longest of direct tool or sub-agent seconds)

and with at most P sub-agents at work, any schedule of a stage takes at least max(longest, work / P) and a greedy one
at most work / P + (1 - 1 / P) * longest. Seconds are those of the calls themselves; waiting for a slot, for a rate
limit or for a retry is what the makespan has on top of the bound.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .ledger import MAIN, Ledger
from .limits import Counting, stage_cost, steps_of

DELEGATION = ("create_subagent", "assign_task")


@dataclass(frozen=True)
class Stage:
    """One acting turn. own_calls: direct tool calls; sub_steps: critical steps of each sub-agent of the batch."""

    own_calls: int
    sub_steps: tuple[int, ...] = ()


def critical_steps(stages: Iterable[Stage], counting: Counting = "turns") -> int:
    """Sum over stages of own steps plus the longest sub-agent's.

    counting "turns": a turn is one step however many calls it makes; "calls": every direct call is a step, and the
    batch of sub-agents one more. A sub-agent that failed or was cancelled counts the steps it took.
    """
    return sum(stage_cost(stage.own_calls, list(stage.sub_steps), counting)[1] for stage in stages)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Measured of one run. Times in seconds of the run's clock, pauses between sessions left out.

    critical_path: the longest chain of calls that had to follow each other. lower_bound, upper_bound: of the makespan
    with ``concurrent`` slots. bound: lower_bound / makespan, 1 = nothing wasted. serial_seconds: all calls one after
    the other. speed_up: serial_seconds / makespan. utilisation: working time of all agents / (agents * makespan).
    mean_concurrency: sub-agents with a slot, and the orchestrator while it works, averaged over the makespan.
    efficiency: speed_up / mean_concurrency. finish_rate: completed / assigned (1 when nothing was assigned).
    task_seconds_p50, _p95: run time of started assignments.
    """

    makespan: float
    critical_path: float
    lower_bound: float
    upper_bound: float
    bound: float
    serial_seconds: float
    speed_up: float
    busy_seconds: float
    queue_seconds: float
    utilisation: float
    peak_concurrency: int
    mean_concurrency: float
    efficiency: float
    concurrent: int
    critical_steps_turns: int
    critical_steps_calls: int
    total_steps: int
    assigned: int
    created: int
    outcomes: dict[str, int]
    finish_rate: float
    task_seconds_p50: float
    task_seconds_p95: float
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost: float
    model_calls: int
    tool_calls: int
    lost_calls: int

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def measure(ledger: Ledger) -> Metrics:
    """Compute :class:`Metrics` from the ledger alone."""
    paths = Paths(ledger)
    run, tasks, totals = ledger.run, ledger.tasks(), ledger.totals()
    makespan = run["active"] or 0.0
    outcomes: dict[str, int] = defaultdict(int)
    for task in tasks:
        outcomes[task["outcome"] or "running"] += 1
    intervals = [(t["active_start"], t["active_end"]) for t in tasks if t["active_start"] is not None]
    held = sum(task["slot_seconds"] for task in tasks)
    busy = sum(paths.own_seconds(agent) for agent in paths.agents)
    serial = paths.serial_seconds()
    mean = (held + paths.own_seconds(MAIN)) / makespan if makespan else 0.0
    speed_up = serial / makespan if makespan else 1.0
    lower = paths.lower_bound(MAIN)
    agents = 1 + len(intervals)
    return Metrics(
        makespan=makespan, critical_path=paths.critical_path(MAIN), lower_bound=lower,
        upper_bound=paths.upper_bound(MAIN), bound=min(1.0, lower / makespan) if makespan else 1.0,
        serial_seconds=serial, speed_up=speed_up, busy_seconds=busy,
        queue_seconds=sum(t["queue_seconds"] or 0.0 for t in tasks),
        utilisation=busy / (agents * makespan) if makespan else 1.0,
        peak_concurrency=peak_concurrency(intervals), mean_concurrency=mean,
        efficiency=speed_up / mean if mean else 1.0, concurrent=paths.slots,
        critical_steps_turns=paths.critical_steps(MAIN, "turns"),
        critical_steps_calls=paths.critical_steps(MAIN, "calls"),
        total_steps=sum(paths.steps(agent, "turns") for agent in paths.agents), assigned=len(tasks),
        created=ledger.one("SELECT count(DISTINCT name) AS n FROM agent")["n"], outcomes=dict(outcomes),
        finish_rate=outcomes["completed"] / len(tasks) if tasks else 1.0,
        task_seconds_p50=quantile([t["slot_seconds"] for t in tasks if t["active_start"] is not None], 0.5),
        task_seconds_p95=quantile([t["slot_seconds"] for t in tasks if t["active_start"] is not None], 0.95),
        tokens_in=totals["tokens_in"], tokens_out=totals["tokens_out"], tokens_cached=totals["tokens_cached"],
        cost=totals["cost"], model_calls=totals["model_calls"], tool_calls=totals["tool_calls"],
        lost_calls=totals["lost"],
    )  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of ``values`` do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def peak_concurrency(intervals: Sequence[tuple[float, float]]) -> int:
    """The most intervals that overlap; one that ends when another starts does not overlap it."""
    edges = sorted([(start, 1) for start, _ in intervals] + [(max(start, end), -1) for start, end in intervals],
                   key=lambda edge: (edge[0], edge[1]))  # fmt: skip
    now = most = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


class Paths:
    """The tree of turns of one run, and everything that is computed by walking it."""

    def __init__(self, ledger: Ledger):
        limits = ledger.run["limits"]
        self.slots = max(1, int(limits.get("concurrent") or 1))
        self.turns: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for call in ledger.rows(
            "SELECT agent, step, seconds, outcome, tool_calls FROM model_call ORDER BY agent, step"
        ):
            self.turns[call["agent"]].append(call)
        self.tools: dict[tuple[str, int], list[float]] = defaultdict(list)
        for tool in ledger.rows("SELECT agent, step, seconds, name, task FROM tool_call"):
            if tool["task"] is None and tool["name"] not in DELEGATION:
                self.tools[tool["agent"], tool["step"]].append(tool["seconds"] or 0.0)
        self.children: dict[tuple[str, int], list[str]] = defaultdict(list)
        tasks = ledger.tasks()
        for task in tasks:
            self.children[task["owner"], task["turn"]].append(task["id"])
        self.delegating = {task["owner"] for task in tasks}
        self.agents = [MAIN, *(t["id"] for t in tasks)]

    def _stages(self, agent: str) -> Iterable[tuple[float, float, list[str]]]:
        """(model seconds, longest direct tool, sub-agents) of each turn."""
        for call in self.turns[agent]:
            key = (agent, call["step"])
            yield call["seconds"] or 0.0, max(self.tools[key], default=0.0), self.children[key]

    def own_seconds(self, agent: str) -> float:
        """Time the agent itself was at work: its model calls, and in each turn its longest direct tool."""
        return sum(model + tool for model, tool, _ in self._stages(agent))

    def serial_seconds(self) -> float:
        models = sum(call["seconds"] or 0.0 for calls in self.turns.values() for call in calls)
        return models + sum(sum(seconds) for seconds in self.tools.values())

    def critical_path(self, agent: str) -> float:
        return sum(
            model + max([tool, *map(self.critical_path, children)]) for model, tool, children in self._stages(agent)
        )

    def critical_chain(self) -> set[str]:
        """The sub-agents on the critical path."""
        chain: set[str] = set()
        todo = [MAIN]
        while todo:
            for _, tool, children in self._stages(todo.pop()):
                longest = max(children, key=self.critical_path, default=None)
                if longest is not None and self.critical_path(longest) > tool:
                    chain.add(longest)
                    todo.append(longest)
        return chain

    def _work(self, agent: str) -> float:
        """Slot time of an agent and its descendants (a waiting parent lends its slot)."""
        below = sum(self._work(child) for _, _, children in self._stages(agent) for child in children)
        return self.own_seconds(agent) + below

    def lower_bound(self, agent: str) -> float:
        total = 0.0
        for model, tool, children in self._stages(agent):
            longest = max([tool, *map(self.lower_bound, children)])
            total += model + max(longest, sum(map(self._work, children)) / self.slots)
        return total

    def upper_bound(self, agent: str) -> float:
        total = 0.0
        for model, tool, children in self._stages(agent):
            longest = max(map(self.upper_bound, children), default=0.0)
            greedy = sum(map(self._work, children)) / self.slots + (1 - 1 / self.slots) * longest
            total += model + max(tool, longest, greedy)
        return total

    def steps(self, agent: str, counting: Counting) -> int:
        """Steps an agent took, whatever became of it."""
        done = [c for c in self.turns[agent] if c["outcome"] == "completed"]
        return sum(steps_of(_calls(call), counting) for call in done)

    def critical_steps(self, agent: str, counting: Counting) -> int:
        """Of a delegating agent: its stages, and below ``main`` its final message; of another: its steps."""
        if agent != MAIN and agent not in self.delegating:
            return self.steps(agent, counting)
        stages, final = [], 0
        for call in self.turns[agent]:
            if call["outcome"] != "completed":
                continue
            children = self.children[agent, call["step"]]
            if _calls(call):
                subs = tuple(self.critical_steps(child, counting) for child in children)
                stages.append(Stage(_calls(call) - len(children), subs))
            else:
                final = 1
        return critical_steps(stages, counting) + (final if agent != MAIN else 0)


def _calls(call: dict[str, Any]) -> int:
    return len(json.loads(call["tool_calls"] or "[]"))
