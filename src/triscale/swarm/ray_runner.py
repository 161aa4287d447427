"""Sub-agents as Ray tasks: the same agent loop in another process or on another machine, the same log here.

A worker streams its events back while it runs; the driver writes them into the one log, so that limits, the live view,
the ledger and resuming work as they do in one process. What differs: each worker has a rate limiter of its own (the
number of sub-agents at a time is still bounded here), gets its share of the token, cost and time budget when it starts,
and cannot spawn. Events carry the driver's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triscale.config import ConfigError, require

from . import clock
from .agent import AgentRun, RunResult
from .delegation import SUBAGENT_RULE
from .limiter import Limiters
from .limits import Budget, Limits
from .log import SwarmLog
from .resume import Recorded
from .runtime import Runtime
from .scope import Cause, Scope
from .types import ModelError, Outcome, Usage

if TYPE_CHECKING:
    from .config import SwarmConfig
    from .delegation import Assignment


@dataclass(frozen=True)
class Job:
    """Everything one assignment needs in another process; all of it can be pickled."""

    config: SwarmConfig
    task: str
    system_prompt: str
    prompt: str
    limits: Limits
    max_steps: tuple[int, str]
    depth: int
    recorded: Recorded
    workspace: Path | None


class RayRunner:
    """Starts assignments on the Ray cluster that ``ray.init`` finds (RAY_ADDRESS), or on a local one."""

    def __init__(self, config: SwarmConfig):
        if config.limits.depth > 1:
            raise ConfigError(
                "limits.depth", f"{config.limits.depth} with --ray", "Sub-agents on Ray cannot spawn: use 1"
            )
        if config.virtual:
            raise ConfigError("virtual", "Ray needs real time", "Leave --virtual out")
        self.config = config
        self.ray: Any = require("ray", "ray", "running sub-agents as Ray tasks")
        if not self.ray.is_initialized():
            self.ray.init(log_to_driver=False, include_dashboard=False)
        self._work = self.ray.remote(num_cpus=config.ray_cpus, max_retries=0, num_returns="streaming")(work)

    async def run(self, assignment: Assignment, scope: Scope) -> RunResult:
        """One assignment; returns a typed result whatever happens to the worker."""
        runtime = assignment.runtime
        stream = self._work.remote(self._job(assignment))
        usage, steps, text = Usage(), 0, ""
        began = clock.now()
        try:
            async for reference in stream:
                kind, payload = await reference
                if kind == "result":
                    self._close_limiter(runtime, payload)
                    return payload
                self._take(runtime, payload)
                if payload["kind"] == "model.reply":
                    data = payload["data"]
                    usage = usage + _usage(data)
                    steps, text = data["step"], data.get("content") or text
            reason = "the Ray worker ended without a result"
            outcome, limit, external = Outcome.FAILED, None, False
        except asyncio.CancelledError:
            self.ray.cancel(stream, force=False)
            task, cause = asyncio.current_task(), scope.cause
            if task is not None:
                task.uncancel()
            outcome = cause.outcome if cause else Outcome.CANCELLED
            reason, limit = (cause.reason, cause.limit) if cause else ("cancelled from outside the run", None)
            external = cause is None
        except self.ray.exceptions.RayError as error:
            outcome, limit, external = Outcome.FAILED, None, False
            reason = f"Ray worker: {type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}"
        return RunResult(
            outcome, text, reason, limit, steps, steps, usage, usage.tokens, clock.now() - began, 0.0, external
        )

    def _job(self, assignment: Assignment) -> Job:
        runtime, owner = assignment.runtime, assignment.owner
        budget, limits = runtime.budget, owner.limits.for_child()
        if limits.tokens is not None:
            limits = replace(limits, tokens=max(1, limits.tokens - budget.usage.tokens))
        if limits.cost is not None:
            limits = replace(limits, cost=max(1e-9, limits.cost - budget.usage.cost))
        if limits.wall_seconds is not None:
            limits = replace(limits, wall_seconds=max(1e-3, budget.seconds_left() or 0.0))
        return Job(
            config=self.config, task=assignment.task, prompt=assignment.prompt, limits=limits,
            system_prompt=f"{owner.agents[assignment.agent]}\n\n{SUBAGENT_RULE}", max_steps=assignment.max_steps(),
            depth=owner.depth + 1, recorded=_part_of(runtime.recorded, assignment.task), workspace=runtime.workspace,
        )  # fmt: skip

    def _take(self, runtime: Runtime, event: dict[str, Any]) -> None:
        """Write a worker's event into the run's log, and count what it spent."""
        runtime.log.write(event["kind"], span=event["span"], parent=event["parent"], **event["data"])
        if event["kind"] == "model.reply":
            runtime.budget.settle(0, _usage(event["data"]))
            runtime.log.commit_soon()

    def _close_limiter(self, runtime: Runtime, result: RunResult) -> None:
        if result.limit == "quota":
            limiter = runtime.limiters.get(runtime.subagent_client.endpoint)
            limiter.close(ModelError("quota", result.reason))


def _usage(data: dict[str, Any]) -> Usage:
    return Usage(data["tokens_in"], data["tokens_out"], data["tokens_cached"], data["cost"])


def _part_of(recorded: Recorded, task: str) -> Recorded:
    mine = lambda table: {key: value for key, value in table.items() if key.startswith(f"{task}#")}
    return Recorded(replies=mine(recorded.replies), results=mine(recorded.results))


# -- in the worker ----------------------------------------------------------------------------------------------------


class Worker:
    """One job in a thread with its own event loop, so that a streaming Ray task can hand its events out."""

    def __init__(self, job: Job):
        self.job = job
        self.items: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.scope = Scope(None, job.limits.task_seconds)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        try:
            self.items.put(("result", clock.run(self._agent())))
        except BaseException as error:  # whatever it is, the driver must hear of it
            self.items.put(("error", error))

    async def _agent(self) -> RunResult:
        self.loop = asyncio.get_running_loop()
        listener = lambda event: self.items.put(("event", _plain(event)))
        return await _run_agent(self.job, self.scope, listener)

    def stop(self) -> None:
        """Cancel the agent and wait until it has ended: a cancelled Ray task must not go on spending."""
        if self.loop is not None and self.thread.is_alive():
            cause = Cause(Outcome.CANCELLED, "the Ray task was cancelled")
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                self.loop.call_soon_threadsafe(self.scope.stop, cause)
            self.thread.join(self.job.limits.grace_seconds + 5.0)


def work(job: Job) -> Iterator[tuple[str, Any]]:
    """Run one job; yields ("event", event) as they happen and at last ("result", RunResult)."""
    worker = Worker(job)
    worker.thread.start()
    try:
        while True:
            item = worker.items.get()
            if item[0] == "error":
                raise item[1]
            yield item
            if item[0] == "result":
                return
    finally:  # also when Ray cancels the task
        worker.stop()


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    return {key: event[key] for key in ("kind", "span", "parent", "data")}


async def _run_agent(job: Job, scope: Scope, listener: Any) -> RunResult:
    from .config import build_clients, build_tools, build_world

    world = build_world(job.config)
    _, client = build_clients(job.config, world)
    tools = await build_tools(job.config, world, index=_index(job.config.docs) if job.config.docs else None)
    log = SwarmLog(None, "worker")
    log.listeners.append(listener)
    budget = Budget(job.limits)
    budget.start()
    runtime = Runtime(log=log, limits=job.limits, limiters=Limiters(policy=job.config.retries), budget=budget,
                      recorded=job.recorded, subagent_client=client, subagent_tools=tuple(tools),
                      sampling=job.config.sampling, workspace=job.workspace)  # fmt: skip
    run = AgentRun(runtime, id=job.task, client=client, system_prompt=job.system_prompt, prompt=job.prompt, tools=tools,
                   limits=job.limits, scope=scope, max_steps=job.max_steps,
                   depth=job.depth)  # fmt: skip
    try:
        return await run.run()
    finally:
        await client.close()
        for tool in tools:
            await tool.close()


@functools.lru_cache(maxsize=4)
def _index(folder: str) -> Any:
    """A worker process indexes a folder once, however many sub-agents it runs."""
    from .tools import DocumentIndex

    return DocumentIndex.from_folder(folder)
