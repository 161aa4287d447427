"""The event log of a swarm run, and the exact data fields of each event kind.

A run is a directory: ``events.jsonl`` (this log), ``run.json`` (what is needed to resume), ``workspace/`` (files of
the tools), ``traces.jsonl`` (token ids and log-probabilities, only with clients that fill them), ``report/``.

**Ids.** The orchestrator's run has the id ``main``. An assignment has a task id, which is also the id of the
sub-agent's run: ``t2.0`` is the first assignment of the orchestrator's turn 2, ``t2.0/t1.3`` the fourth of that
sub-agent's turn 1 (only with depth > 1). The model call of turn s of run r is ``r#s``; its tool calls are ``r#s.i``
in the order of the reply. Ids depend only on this structure, so a resumed run gives the same ids to the same things.
``span`` of an event is the id it is about and ``parent`` the enclosing one:

    run name -> main -> main#1 (model call) ; main -> main#1.0 (tool call) -> t1.0 (assignment) -> t1.0#1 ...

**Tokens, cost and seconds** are on ``model.reply`` alone (the leaves); every total is derived by summing them. The
totals that ``task.end`` and ``result`` repeat are for people and for checks.

**Resume.** ``swarm.resume`` starts another session of the same log. What was recorded is replayed without new events.
A ``model.call`` or ``tool.call`` without its reply was lost in the crash and appears again under the same id; a
``task.end`` that appears again replaces the earlier one (a task that had not completed was continued).

Event kinds and their data (``?`` = may be missing or null):

``swarm.start``  task (the question), limits (resolved, a dict), mode ("swarm" | "single"), system_prompt, agent
    ("main"), models {orchestrator, subagent: {name, endpoint, context_window?}}, tools [names], counting ("turns" |
    "calls": how steps are counted), virtual (bool: virtual clock), world?
``swarm.resume``  session (2, 3, ...), spent {tokens_in, tokens_out, tokens_cached, cost}, limits
``agent.create``  agent (= name), name, system_prompt, owner (run id of the creator), turn, call, replaces (bool)
``task.assign``  task, agent (name of the created agent), prompt, owner (run id of the parent), turn, index (in the
    turn's batch), call (the tool call's id), depth (1 = child of main)
``task.start``  task, agent, attempt (1, or more after a resume), queue_seconds (waited for a slot)
``task.end``  task, agent, outcome (:class:`~triscale.swarm.types.Outcome`), reason ("" when completed), limit? (name
    of the limit), seconds (run time), queue_seconds (waiting: for a slot, and for the rate limiter), steps,
    critical_steps, tokens_in, tokens_out, tokens_cached, cost (own model calls), total_tokens (with descendants),
    result (full final or partial text), handle ("result:" + task), delivered (characters shown to the parent; null
    if it had none)
``model.call``  call, agent (run id), step, model, endpoint, messages (how many), tools (how many), opening? (at step
    1: the system and user messages, [{role, content}]; ``resume.conversation`` rebuilds the rest), note? (text the
    runtime appended to the last tool message before this call)
``model.reply``  call, agent, step, outcome ("completed" or why not), reason, tokens_in, tokens_out, tokens_cached,
    cost, seconds (of the attempt that counted), queue_seconds (waiting for the rate limiter and between attempts),
    attempts, model, finish_reason, content, reasoning?, tool_calls [{id, name, arguments}], trace? {file, offset},
    retries [{kind, message, seconds}] (what the earlier attempts died of), estimated? (true when the server reported
    no usage and tokens are estimates)
``tool.call``  call, agent, step, index, name, arguments (string as the model wrote it), tool_call_id
``tool.result``  call, agent, name, outcome, reason, seconds, content (exactly what the model is shown), chars (of the
    whole result), truncated (bool), handle? ("result:" + call, when truncated or an assignment), full? (whole text
    when truncated and not an assignment), evidence [ids], data {}, task? (for assign_task)
``stage``  agent (run id), turn, main_steps, sub_steps [one per assignment], critical_steps (of this stage); one that
    appears again for the same agent and turn replaces the earlier one
``limit``  limit (name), value, used, scope (run id, or "run"), message
``limiter``  endpoint, event ("shrink" | "grow" | "pause" | "closed"), capacity, reason, seconds?
``warning``  message
``result``  outcome, reason, limit?, text (the final or best partial answer), seconds, steps, critical_steps,
    tokens_in, tokens_out, tokens_cached, cost, outcomes {outcome: count of assignments}, resume (command, "" if done)
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triscale.events import EventWriter, check_event

from . import clock
from .types import TokenTrace

COMMIT_SECONDS = 0.02  # replies that arrive within this share one fsync


class SwarmLog:
    """Writes the events of one run and gives results back by handle.

    directory: the run's folder, or None to keep everything in memory (rollouts, tests); then ``events`` is the list.
    Finished sub-agents cost no memory with a directory: a handle is an offset in the log.
    """

    def __init__(self, directory: Path | None, run: str):
        self.directory, self.run = directory, run
        self.events: list[dict[str, Any]] = []
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self._handles: dict[str, tuple[int, int] | str] = {}
        self._writer: EventWriter | None = None
        self._fd = -1
        self._pending: asyncio.Task[None] | None = None
        self._syncing = asyncio.Lock()
        if directory is not None:
            self._writer = EventWriter(directory / "events.jsonl", run, clock.timestamp)
            self._writer.listeners = self.listeners
            self._fd = os.open(self._writer.path, os.O_RDONLY)

    @property
    def path(self) -> Path | None:
        return self._writer.path if self._writer is not None else None

    def write(self, kind: str, /, *, span: str | None = None, parent: str | None = None, **data: Any) -> None:
        if self._writer is not None:
            self._writer.write(kind, span=span, parent=parent, **data)
            return
        check_event(kind, data)
        event = {"v": 1, "time": clock.timestamp(), "run": self.run, "span": span, "parent": parent, "kind": kind,
                 "data": data}  # fmt: skip
        self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def write_result(self, handle: str, field: str, kind: str, /, **event: Any) -> None:
        """Like :meth:`write`; the text in ``event[field]`` can afterwards be read back by ``handle``."""
        if self._writer is None:
            self.write(kind, **event)
            self._handles[handle] = event[field]
            return
        start = os.fstat(self._fd).st_size
        self.write(kind, **event)
        self._handles[handle] = (start, os.fstat(self._fd).st_size - start)

    def remember(self, handle: str, text: str) -> None:
        """Make a result of an earlier session readable."""
        self._handles[handle] = text

    def result_text(self, handle: str) -> str | None:
        """The whole text behind a handle, or None if there is no such handle."""
        place = self._handles.get(handle)
        if place is None or isinstance(place, str):
            return place
        data = json.loads(os.pread(self._fd, place[1], place[0]))["data"]
        return data["full"] if data.get("full") is not None else data.get("result", data.get("content", ""))

    def write_trace(self, call: str, trace: TokenTrace | None) -> dict[str, Any] | None:
        """Keep token ids and log-probabilities beside the log; returns where, for ``model.reply``."""
        if trace is None or trace.token_ids is None or self.directory is None:
            return None
        row = {"call": call, "weight_version": trace.weight_version}
        for name in ("prompt_ids", "token_ids", "logprobs"):
            values = getattr(trace, name)
            row[name] = values.tolist() if hasattr(values, "tolist") else values
        with open(self.directory / "traces.jsonl", "a", encoding="utf-8") as file:
            offset = file.tell()
            file.write(json.dumps(row) + "\n")
        return {"file": "traces.jsonl", "offset": offset}

    def commit_soon(self) -> asyncio.Task[None] | None:
        """Have everything written so far fsynced within moments, together with what others write meanwhile."""
        if self._writer is None or clock.is_virtual():  # nothing is paid for under a virtual clock
            return None
        if self._pending is None:
            self._pending = asyncio.get_running_loop().create_task(self._sync())
        return self._pending

    async def commit(self) -> None:
        """Return when everything written so far is on disk: "paid" means fsynced."""
        pending = self.commit_soon()
        if pending is not None:
            await asyncio.shield(pending)

    async def _sync(self) -> None:
        await asyncio.sleep(COMMIT_SECONDS)
        async with self._syncing:
            self._pending = None  # what is written from now on belongs to the next one
            await asyncio.get_running_loop().run_in_executor(None, os.fsync, self._fd)

    async def close(self) -> None:
        if self._pending is not None:
            await asyncio.shield(self._pending)
        if self._writer is not None:
            async with self._syncing:
                self._writer.close()
                os.close(self._fd)
                self._fd = -1
