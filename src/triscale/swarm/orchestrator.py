"""A swarm: one orchestrator, its sub-agents, their limits, and the log of what happened.

    swarm = Swarm(HttpClient.Config(model="...", base_url="...").build(), tools=[...], directory=Path("run"))
    result = await swarm.run("Which of these companies were founded before 1950?")

The orchestrator and its sub-agents share work the way of arXiv 2602.02276 (section 3): sub-agents are created by name,
assignments of one turn run at the same time in private contexts, and only their final messages come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from triscale.config import TriScaleError
from triscale.events import Event, read_events

from . import clock
from .agent import AgentRun, RunResult
from .limiter import Limiters
from .limits import Budget, Limits
from .log import SwarmLog
from .resume import Recorded
from .runtime import Observer, Runtime, Sampling
from .scope import Cause, Scope
from .types import ModelClient, Outcome, Tool, Usage

Mode = Literal["swarm", "single"]

ORCHESTRATOR_PROMPT = """You collect and check information to answer a task. Understand the task, plan, and work \
efficiently with the tools you have. You can create sub-agents and assign tasks to them; assignments issued in one \
message run at the same time, each in its own empty memory, and return one final message each. When you have what the \
task asks for, write the final answer."""
SINGLE_PROMPT = """You collect and check information to answer a task. Understand the task, plan, and work \
efficiently with the tools you have. When you have what the task asks for, write the final answer."""


@dataclass(frozen=True)
class SwarmResult:
    """How a run ended.

    text: the final answer, or the orchestrator's last words when ``outcome`` is not completed. outcomes: number of
    assignments by outcome; anything but completed there means the answer may rest on partial results. usage: of the
    whole tree, all sessions. seconds: wall time, all sessions. abandoned: calls that ignored their cancellation.
    """

    outcome: Outcome
    text: str
    reason: str
    limit: str | None
    seconds: float
    steps: int
    critical_steps: int
    usage: Usage
    outcomes: dict[str, int]
    directory: Path | None
    abandoned: tuple[str, ...] = ()

    @property
    def partial(self) -> bool:
        """True when something is missing: the run or any assignment did not complete."""
        return self.outcome != Outcome.COMPLETED or any(n and name != "completed" for name, n in self.outcomes.items())

    @property
    def resume_command(self) -> str:
        done = self.outcome == Outcome.COMPLETED or self.directory is None
        return "" if done else f"triscale swarm resume {self.directory}"


@dataclass(kw_only=True)
class Swarm:
    """A run to be: models, tools, limits. ``run`` may be called once.

    client, subagent_client: the orchestrator's model and the sub-agents' (the same one if left out). tools,
    subagent_tools: direct tools of the orchestrator, and of sub-agents (the same if left out). directory: where the
    log goes; None keeps it in memory (:attr:`log`). limiters: share one to share an endpoint's rate limit between
    swarms. observer: called with every new model reply. listeners: called with every event as it is written.
    mode "single" runs the same task with the same tools and limits but nobody to delegate to. close_clients: whether
    the end of the run closes clients and tools.
    """

    client: ModelClient
    subagent_client: ModelClient | None = None
    tools: Sequence[Tool] = ()
    subagent_tools: Sequence[Tool] | None = None
    limits: Limits = Limits()
    system_prompt: str | None = None
    directory: Path | None = None
    mode: Mode = "swarm"
    sampling: Sampling = Sampling()
    limiters: Limiters | None = None
    observer: Observer | None = None
    listeners: Sequence[Callable[[dict[str, Any]], None]] = ()
    remote: Any = None
    world: str | None = None
    close_clients: bool = True
    log: SwarmLog | None = field(default=None, init=False)
    _scope: Scope | None = field(default=None, init=False)
    _runtime: Runtime | None = field(default=None, init=False)
    _early: Cause | None = field(default=None, init=False)
    _listener: Any = field(default=None, init=False)

    def cancel(self, reason: str = "cancelled by the user") -> None:
        """Stop the run and every descendant. ``run`` then returns, within the grace period, what there is."""
        cause = Cause(Outcome.CANCELLED, reason)
        if self._scope is None:
            self._early = cause
        else:
            self._scope.stop(cause)

    def cancel_task(self, task: str, reason: str = "cancelled by the user") -> bool:
        """Stop one assignment (``t2.0``) and its descendants; False if no such assignment is under way."""
        scope = self._runtime.scopes.get(task) if self._runtime is not None else None
        if scope is None:
            return False
        scope.stop(Cause(Outcome.CANCELLED, reason))
        return True

    async def run(self, task: str) -> SwarmResult:
        """Run to the end, or on from where an earlier session in this folder stopped, and return the typed result.

        Raises :class:`TriScaleError` when the folder holds another task, and ``CancelledError`` when the calling task
        itself is cancelled, after everything below it has ended.
        """
        if self.log is not None:
            raise TriScaleError("a Swarm runs once; make a new one for another task")
        recorded = self._load_record(task)
        if recorded.final is not None and recorded.final["outcome"] == Outcome.COMPLETED:
            await self._close_clients()
            return self._recorded_result(recorded.final)
        self.log = log = SwarmLog(self.directory, self.directory.name if self.directory else "swarm")
        log.listeners.extend(self.listeners)
        runtime = self._make_runtime(log, recorded)
        self._write_start(log, runtime, task, recorded)
        scope = self._scope = Scope()
        if self._early is not None:
            scope.attach()
            scope.stop(self._early)
        timer = self._wall_timer(runtime.budget, scope)
        try:
            main = self._make_main(runtime, scope, task)
            result = await main.run()
        finally:
            if timer is not None:
                timer.cancel()
        try:
            final = self._finish(runtime, result)
        finally:
            await self._close(log)
        if result.external:
            raise asyncio.CancelledError
        return final

    def _load_record(self, task: str) -> Recorded:
        path = self.directory / "events.jsonl" if self.directory is not None else None
        if path is None or not path.exists():
            return Recorded()
        recorded = Recorded.load(read_events(path))
        if recorded.start is None:
            return Recorded()
        if recorded.start["task"] != task or recorded.start["mode"] != self.mode:
            raise TriScaleError(f"{self.directory} holds a run of another task: {recorded.start['task']!r}. "
                                "Choose another folder")  # fmt: skip
        return recorded

    def _recorded_result(self, data: dict[str, Any]) -> SwarmResult:
        """A finished run again: what it said then, and nothing is written or called."""
        usage = Usage(data["tokens_in"], data["tokens_out"], data["tokens_cached"], data["cost"])
        return SwarmResult(
            outcome=Outcome.COMPLETED, text=data["text"], reason="", limit=None, seconds=data["seconds"],
            steps=data["steps"], critical_steps=data["critical_steps"], usage=usage, outcomes=data["outcomes"],
            directory=self.directory,
        )  # fmt: skip

    def _make_runtime(self, log: SwarmLog, recorded: Recorded) -> Runtime:
        limits = self.limits
        limiters = self.limiters or Limiters(capacity=max(limits.concurrent, 1))
        self._listener = lambda **change: log.write("limiter", **change)
        limiters.listeners.append(self._listener)
        workspace = self.directory / "workspace" if self.directory is not None else None
        if workspace is not None:
            workspace.mkdir(parents=True, exist_ok=True)
        subagent_tools = self.tools if self.subagent_tools is None else self.subagent_tools
        budget = Budget(limits, usage=recorded.spent, prior_seconds=recorded.seconds)
        budget.start()
        self._runtime = Runtime(
            log=log, limits=limits, limiters=limiters, budget=budget, recorded=recorded, sampling=self.sampling,
            subagent_client=self.subagent_client or self.client, subagent_tools=tuple(subagent_tools),
            workspace=workspace, observer=self.observer, remote=self.remote,
        )  # fmt: skip
        return self._runtime

    def _prompt(self) -> str:
        if self.system_prompt is not None:
            return self.system_prompt
        return ORCHESTRATOR_PROMPT if self.mode == "swarm" else SINGLE_PROMPT

    def _write_start(self, log: SwarmLog, runtime: Runtime, task: str, recorded: Recorded) -> None:
        if recorded.sessions:
            spent = recorded.spent
            log.write("swarm.resume", span="main", parent=log.run, session=recorded.sessions + 1,
                      limits=self.limits.to_dict(), spent={"tokens_in": spent.tokens_in, "cost": spent.cost,
                      "tokens_out": spent.tokens_out, "tokens_cached": spent.tokens_cached})  # fmt: skip
            return
        models = {}
        for role, client in (("orchestrator", self.client), ("subagent", runtime.subagent_client)):
            models[role] = {"name": client.name, "endpoint": client.endpoint, "context_window": client.context_window}
        log.write("swarm.start", span="main", parent=log.run, task=task, limits=self.limits.to_dict(), mode=self.mode,
                  system_prompt=self._prompt(), agent="main", models=models, tools=[t.name for t in self.tools],
                  counting=self.limits.counting, virtual=clock.is_virtual(), world=self.world)  # fmt: skip

    def _make_main(self, runtime: Runtime, scope: Scope, task: str) -> AgentRun:
        limits = self.limits if self.mode == "swarm" else replace(self.limits, depth=0)
        most = (limits.orchestrator_steps, "orchestrator_steps")
        return AgentRun(runtime, id="main", client=self.client, system_prompt=self._prompt(), prompt=task,
                        tools=self.tools, limits=limits, scope=scope, max_steps=most)  # fmt: skip

    def _wall_timer(self, budget: Budget, scope: Scope) -> asyncio.TimerHandle | None:
        left = budget.seconds_left()
        if left is None:
            return None
        cause = Cause(Outcome.LIMIT, f"wall_seconds = {self.limits.wall_seconds:g} used up", "wall_seconds")
        return asyncio.get_running_loop().call_later(left, scope.stop, cause)

    def _finish(self, runtime: Runtime, result: RunResult) -> SwarmResult:
        budget = runtime.budget
        final = SwarmResult(
            outcome=result.outcome, text=result.text, reason=result.reason, limit=result.limit, seconds=budget.seconds,
            steps=result.steps, critical_steps=result.critical_steps, usage=budget.usage,
            outcomes=dict(runtime.outcomes), directory=self.directory, abandoned=tuple(runtime.abandoned),
        )  # fmt: skip
        usage = budget.usage
        runtime.log.write(
            "result", span="main", parent=runtime.log.run, outcome=final.outcome, reason=final.reason,
            limit=final.limit, text=final.text, seconds=final.seconds, steps=final.steps,
            critical_steps=final.critical_steps, tokens_in=usage.tokens_in, tokens_out=usage.tokens_out,
            tokens_cached=usage.tokens_cached, cost=usage.cost, outcomes=final.outcomes, resume=final.resume_command,
        )  # fmt: skip
        return final

    async def _close(self, log: SwarmLog) -> None:
        if self._runtime is not None:
            self._runtime.limiters.listeners.remove(self._listener)
        await log.close()
        await self._close_clients()

    async def _close_clients(self) -> None:
        if not self.close_clients:
            return
        seen: set[int] = set()
        everything: Iterable[Any] = (self.client, self.subagent_client, *self.tools, *(self.subagent_tools or ()))
        for thing in everything:
            if thing is not None and id(thing) not in seen:
                seen.add(id(thing))
                await thing.close()


def events_of(directory: Path) -> list[Event]:
    """All events of a run's folder."""
    return list(read_events(directory / "events.jsonl"))
