"""Limits of a swarm run and the one budget that its whole tree shares.

Limits are enforced by the runtime before anything is spent, stated to the model and to the user, and inherited by
children. A limit that stops something raises :class:`LimitReached`, which becomes the outcome ``limit``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from triscale.config import ConfigError, TriScaleError

from . import clock
from .types import Usage

Counting = Literal["turns", "calls"]


class LimitReached(TriScaleError):
    """A limit stopped an agent. ``limit`` is the field of :class:`Limits` (or ``quota``, ``context``)."""

    def __init__(self, limit: str, value: Any, used: Any, message: str = ""):
        self.limit, self.value, self.used = limit, value, used
        super().__init__(message or f"{limit} = {value} reached ({used} used)")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run may use at most; ``None`` means unlimited. Raises :class:`ConfigError` on impossible values.

    concurrent: sub-agents at work at once; more assignments wait in a queue. total: assignments of the run.
    depth: 1 = the orchestrator's sub-agents cannot spawn. orchestrator_steps, subagent_steps: model turns of one run.
    critical_steps: sum over stages of the orchestrator's steps plus the longest sub-agent's (arXiv 2602.02276, 3).
    counting: a step is a model turn ("turns") or a tool call ("calls"; a turn without one counts 1).
    tokens, cost, wall_seconds: of the whole tree. Calls under way when one is reached still finish, so the overshoot
    is at most their replies. task_seconds: run time of one assignment, queueing not counted. model_seconds,
    tool_seconds: one call. reply_tokens: ``max_tokens`` of each model call. calls_per_turn: tool calls of one reply;
    the rest get an error result. agents: names one agent may create. grace_seconds: how long a cancelled call may take
    to stop before it is abandoned and reported.
    """

    concurrent: int = 100
    total: int = 1000
    depth: int = 1
    orchestrator_steps: int = 100
    subagent_steps: int = 50
    critical_steps: int | None = None
    counting: Counting = "turns"
    tokens: int | None = None
    cost: float | None = None
    wall_seconds: float | None = None
    task_seconds: float | None = 7200.0
    model_seconds: float = 600.0
    tool_seconds: float = 120.0
    reply_tokens: int | None = None
    calls_per_turn: int = 2000
    agents: int = 1000
    grace_seconds: float = 5.0

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.name == "counting":
                if value not in ("turns", "calls"):
                    raise ConfigError("limits.counting", f"{value!r} is not allowed", "Use 'turns' or 'calls'")
                continue
            if value is None and "None" not in str(spec.type):
                raise ConfigError(f"limits.{spec.name}", "cannot be unlimited", "Give a number")
            least = 0 if spec.name in ("total", "depth", "grace_seconds") else None
            if value is not None and (value < 0 or (value == 0 and least is None)):
                raise ConfigError(f"limits.{spec.name}", f"{value!r} is too small", "Give a positive number")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def for_child(self) -> Limits:
        """What a sub-agent inherits: everything, one level less to spawn."""
        return dataclasses.replace(self, depth=max(0, self.depth - 1))

    def state_to_model(self, *, delegates: bool) -> str:
        """The sentence that tells an agent its limits; the runtime enforces them whatever it does."""
        steps = self.orchestrator_steps if delegates else self.subagent_steps
        parts = [f"{steps} turns"]
        if delegates:
            parts += [f"{self.total} task assignments in total, {self.concurrent} at work at a time",
                      f"{self.subagent_steps} turns for each sub-agent"]  # fmt: skip
        if self.critical_steps is not None and delegates:
            parts.append(f"{self.critical_steps} critical steps (your own plus the longest sub-agent of each batch)")
        for name, unit in (("tokens", "tokens in all"), ("wall_seconds", "seconds in all")):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{value:g} {unit}")
        return "Limits, enforced by the system: " + "; ".join(parts) + "."


def steps_of(turn_calls: int, counting: Counting) -> int:
    """Steps of one model turn that made ``turn_calls`` tool calls."""
    return 1 if counting == "turns" else max(1, turn_calls)


def stage_cost(own_calls: int, assignments: list[int], counting: Counting) -> tuple[int, int]:
    """(main_steps, critical_steps) of one acting turn: own direct calls, and one batch of sub-agents' steps.

    By turns the whole turn is one stage: 1 + max. By calls each direct call is a stage of its own, and the batch one
    more. A final answer acts on nothing and is no stage.
    """
    batch = len(assignments) > 0
    main = 1 if counting == "turns" else max(1, own_calls + batch)
    return main, main + max(assignments, default=0)


@dataclass
class Budget:
    """Spent and reserved amounts of a whole tree; every agent of the run holds the same object."""

    limits: Limits
    usage: Usage = Usage()
    assigned: int = 0
    reserved: int = 0
    started: float | None = None
    prior_seconds: float = 0.0
    reached: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        self.started = clock.now()

    @property
    def seconds(self) -> float:
        """Wall time spent in all sessions of the run."""
        return self.prior_seconds + (clock.now() - self.started if self.started is not None else 0.0)

    def seconds_left(self) -> float | None:
        wall = self.limits.wall_seconds
        return None if wall is None else max(0.0, wall - self.seconds)

    def exhausted(self) -> LimitReached | None:
        """The limit that leaves nothing to start new work with, if any."""
        limits = self.limits
        for name, used in (("tokens", self.usage.tokens), ("cost", self.usage.cost), ("wall_seconds", self.seconds)):
            most = getattr(limits, name)
            if most is not None and used >= most:
                return self.stop(name, most, round(used, 3))
        return None

    def reserve(self, estimate: int) -> None:
        """Called before every model call, with its estimated prompt tokens; raises :class:`LimitReached`."""
        limits = self.limits
        reached = self.exhausted()
        if reached is not None:
            raise reached
        if limits.tokens is not None and self.usage.tokens + self.reserved + estimate > limits.tokens:
            raise self.stop("tokens", limits.tokens, self.usage.tokens,
                            f"tokens = {limits.tokens} reached ({self.usage.tokens} used, {self.reserved + estimate} "
                            "needed by the calls under way and the next one)")  # fmt: skip
        self.reserved += estimate

    def settle(self, estimate: int, usage: Usage) -> None:
        self.reserved -= estimate
        self.usage = self.usage + usage

    def stop(self, limit: str, value: Any, used: Any, message: str = "") -> LimitReached:
        self.reached[limit] = used
        return LimitReached(limit, value, used, message)
