"""Creating sub-agents and assigning tasks: the orchestrator's two tools (arXiv 2602.02276, appendix E.8), and
``read_result``, which reads on in a result that was shortened to fit the caller's context."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from . import clock
from .context import shorten
from .limits import LimitReached
from .log import SwarmLog
from .runtime import parse_arguments
from .scope import Scope
from .types import ModelError, Outcome, ToolCall, ToolContext, ToolResult, ToolSpec

if TYPE_CHECKING:
    from .agent import AgentRun, RunResult

_TEXT = {"type": "string"}
SPECS = (
    ToolSpec(
        "create_subagent",
        "Register a kind of sub-agent under a name. It runs nothing yet; give it work with assign_task.",
        {
            "type": "object",
            "properties": {
                "name": {**_TEXT, "description": "A unique label. Using one again replaces that sub-agent."},
                "system_prompt": {**_TEXT, "description": "Its role, its abilities and its limits."},
            },
            "required": ["name", "system_prompt"],
        },
    ),
    ToolSpec(
        "assign_task",
        "Start a new run of a created sub-agent. Several assignments issued together run at the same time. Each starts "
        "with an empty memory, sees only its prompt, and returns one final message.",
        {
            "type": "object",
            "properties": {
                "agent": {**_TEXT, "description": "The name of a created sub-agent."},
                "prompt": {**_TEXT, "description": "The task, with everything the sub-agent needs to know."},
            },
            "required": ["agent", "prompt"],
        },
    ),
)
SUBAGENT_RULE = "You work for another agent, which sees nothing but your final message. Put the whole answer into it."
_ANSWER = re.compile(r"<result>(.*?)</result>", re.DOTALL)


class ReadResult:
    """The tool that reads a stored result by its handle."""

    name = "read_result"
    description = "Read a part of a result that was shortened, by its handle."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "handle": {**_TEXT, "description": "As given with the shortened result."},
            "offset": {"type": "integer", "description": "First character, from 0."},
            "length": {"type": "integer", "description": "How many characters, 4000 if left out."},
        },
        "required": ["handle"],
    }
    timeout: float | None = None

    def __init__(self, log: SwarmLog):
        self.log = log

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        text = self.log.result_text(str(arguments.get("handle", "")))
        if text is None:
            return ToolResult(f"Error: there is no result {arguments.get('handle')!r}", Outcome.FAILED)
        try:
            offset, length = max(0, int(arguments.get("offset", 0))), max(1, int(arguments.get("length", 4000)))
        except (TypeError, ValueError):
            return ToolResult("Error: offset and length must be whole numbers", Outcome.FAILED)
        end = min(len(text), offset + length)
        return ToolResult(f"[characters {offset} to {end} of {len(text)}]\n{text[offset:end]}")

    async def close(self) -> None:
        pass


def refuse(run: AgentRun, turn: int, index: int, call: ToolCall) -> str:
    most = run.limits.calls_per_turn
    run.runtime.tell_limit(LimitReached("calls_per_turn", most, index + 1), run.id)
    return _error(run, turn, index, call, f"calls_per_turn = {most}: this call was not made; issue it in a later turn",
                  Outcome.LIMIT)  # fmt: skip


def create(run: AgentRun, turn: int, index: int, call: ToolCall) -> str:
    """Register an agent; creating a name again replaces it."""
    arguments = parse_arguments(call)
    if isinstance(arguments, str):
        return _error(run, turn, index, call, arguments)
    name, prompt = arguments.get("name"), arguments.get("system_prompt")
    if not (isinstance(name, str) and name.strip() and isinstance(prompt, str)):
        return _error(run, turn, index, call, "create_subagent needs the strings name and system_prompt")
    if name not in run.agents and len(run.agents) >= run.limits.agents:
        run.runtime.tell_limit(LimitReached("agents", run.limits.agents, len(run.agents)), run.id)
        return _error(run, turn, index, call, f"agents = {run.limits.agents} names are in use; use one of them",
                      Outcome.LIMIT)  # fmt: skip
    replaces = name in run.agents
    run.agents[name] = prompt
    id = f"{run.id}#{turn}.{index}"
    if id not in run.runtime.recorded.created:
        run.runtime.log.write("agent.create", span=id, parent=run.id, agent=name, name=name, system_prompt=prompt,
                              owner=run.id, turn=turn, call=id, replaces=replaces)  # fmt: skip
    text = f"Sub-agent {name!r} {'replaced' if replaces else 'created'}."
    return _answer(run, turn, index, call, text, Outcome.COMPLETED, "")


def _error(
    run: AgentRun, turn: int, index: int, call: ToolCall, problem: str, outcome: Outcome = Outcome.FAILED
) -> str:
    return _answer(run, turn, index, call, f"Error: {problem}", outcome, problem)


def _answer(run: AgentRun, turn: int, index: int, call: ToolCall, text: str, outcome: Outcome, reason: str) -> str:
    """Record a call that the runtime answers itself."""
    id = f"{run.id}#{turn}.{index}"
    recorded = run.runtime.recorded.result(id, run.id, turn)
    if recorded is not None:
        return recorded["content"]
    _write_call(run, turn, index, call)
    run.runtime.log.write("tool.result", span=id, parent=run.id, call=id, agent=run.id, name=call.name,
                          outcome=outcome, reason=reason, seconds=0.0, content=text, chars=len(text), truncated=False,
                          evidence=[], data={})  # fmt: skip
    return text


def _write_call(run: AgentRun, turn: int, index: int, call: ToolCall) -> None:
    id = f"{run.id}#{turn}.{index}"
    run.runtime.log.write("tool.call", span=id, parent=run.id, call=id, agent=run.id, step=turn, index=index,
                          name=call.name, arguments=call.arguments, tool_call_id=call.id)  # fmt: skip


async def assign(
    run: AgentRun, turn: int, index: int, batch: int, call: ToolCall, share: int, sub_steps: list[int]
) -> str:
    """One assignment from queue to typed outcome; returns the text for the parent. Swallows its cancellation: the
    parent's own is raised by its task group once every sibling has ended."""
    arguments = parse_arguments(call)
    if isinstance(arguments, str):
        return _error(run, turn, index, call, arguments)
    name, prompt = arguments.get("agent"), arguments.get("prompt")
    if not (isinstance(name, str) and isinstance(prompt, str) and prompt.strip()):
        return _error(run, turn, index, call, "assign_task needs the strings agent and prompt")
    if name not in run.agents:
        known = ", ".join(map(repr, run.agents)) or "none yet; create one with create_subagent"
        return _error(run, turn, index, call, f"no sub-agent is called {name!r}; created: {known}")
    task = f"t{turn}.{batch}" if run.id == "main" else f"{run.id}/t{turn}.{batch}"
    return await Assignment(run, task, turn, index, batch, call, name, prompt).deliver(share, sub_steps)


class Assignment:
    """One task of one sub-agent."""

    def __init__(
        self, owner: AgentRun, task: str, turn: int, index: int, batch: int, call: ToolCall, agent: str, prompt: str
    ):
        self.owner, self.task, self.turn, self.index, self.batch = owner, task, turn, index, batch
        self.call, self.agent, self.prompt = call, agent, prompt
        self.runtime = owner.runtime
        self.call_id = f"{owner.id}#{turn}.{index}"
        self.runtime.budget.assigned += 1
        self.number = self.runtime.budget.assigned  # its place among all assignments of the run

    async def deliver(self, share: int, sub_steps: list[int]) -> str:
        runtime, recorded = self.runtime, self.runtime.recorded
        ended = recorded.ends.get(self.task)
        stands = ended is not None and (
            ended["outcome"] == Outcome.COMPLETED or recorded.consumed(self.owner.id, self.turn)
        )
        if ended is not None and stands and self.call_id in recorded.results:
            return self._from_record(ended, sub_steps)
        if self.task not in recorded.assigned:
            _write_call(self.owner, self.turn, self.index, self.call)
            runtime.log.write("task.assign", span=self.task, parent=self.call_id, task=self.task, agent=self.agent,
                              prompt=self.prompt, owner=self.owner.id, turn=self.turn, index=self.batch,
                              call=self.call_id, depth=self.owner.depth + 1)  # fmt: skip
        began = clock.now()
        result, waited = await self._run()
        self.owner.total_tokens += result.total_tokens
        sub_steps.append(result.critical_steps)
        return await self._end(result, waited, clock.now() - began, share)

    def _from_record(self, ended: Mapping[str, Any], sub_steps: list[int]) -> str:
        sub_steps.append(ended["critical_steps"])
        self.runtime.outcomes[ended["outcome"]] += 1
        self.runtime.log.remember(f"result:{self.task}", ended["result"])
        self.owner.total_tokens += ended["total_tokens"]
        return self.runtime.recorded.results[self.call_id]["content"]

    async def _run(self) -> tuple[RunResult, float]:
        """(result, seconds waited for a slot)."""
        from .agent import RunResult

        runtime, began = self.runtime, clock.now()
        scope = Scope(self.owner.scope, runtime.limits.task_seconds)
        scope.attach()
        runtime.scopes[self.task] = scope
        try:
            barrier = self._barrier()
            if barrier is None:
                await runtime.slots.acquire()
                barrier = self._barrier()  # what was reached while it waited
                if barrier is None:
                    return await self._start(scope, clock.now() - began)
                runtime.slots.release()
            runtime.tell_limit(barrier, "run")
            return RunResult(Outcome.NOT_STARTED, "", str(barrier), barrier.limit), clock.now() - began
        except asyncio.CancelledError:
            cause = scope.cause
            current = asyncio.current_task()
            if current is not None:
                current.uncancel()
            reason = f"stopped before it started: {cause.reason}" if cause else "cancelled before it started"
            return RunResult(Outcome.NOT_STARTED, "", reason, cause.limit if cause else None), clock.now() - began
        finally:
            scope.close()
            del runtime.scopes[self.task]

    def _barrier(self) -> LimitReached | None:
        """The limit that forbids starting this assignment, if any."""
        runtime = self.runtime
        if self.number > runtime.limits.total:
            return LimitReached("total", runtime.limits.total, runtime.limits.total)
        closed = runtime.limiters.get(runtime.subagent_client.endpoint).closed
        if closed is not None:
            return LimitReached("quota", None, None, f"{closed.kind}: {closed}")
        return runtime.budget.exhausted()

    async def _start(self, scope: Scope, waited: float) -> tuple[RunResult, float]:
        from .agent import AgentRun

        runtime, owner = self.runtime, self.owner
        runtime.log.write("task.start", span=self.task, parent=self.call_id, task=self.task, agent=self.agent,
                          attempt=runtime.recorded.attempts[self.task] + 1, queue_seconds=waited)  # fmt: skip
        if runtime.remote is not None:
            try:
                return await runtime.remote.run(self, scope), waited
            finally:
                runtime.slots.release()
        child = AgentRun(
            runtime, id=self.task, client=runtime.subagent_client, prompt=self.prompt, scope=scope,
            system_prompt=f"{owner.agents[self.agent]}\n\n{SUBAGENT_RULE}", tools=runtime.subagent_tools,
            limits=owner.limits.for_child(), max_steps=self.max_steps(), depth=owner.depth + 1,
        )  # fmt: skip
        child.holds_slot = True
        try:
            return await child.run(), waited
        finally:
            if child.holds_slot:
                runtime.slots.release()

    def max_steps(self) -> tuple[int, str]:
        """The sub-agent's own limit, or what the critical steps leave for this stage."""
        limits, owner = self.runtime.limits, self.owner
        if limits.critical_steps is not None:
            left = limits.critical_steps - owner.critical - 1
            if left < limits.subagent_steps:
                return max(0, left), "critical_steps"
        return limits.subagent_steps, "subagent_steps"

    async def _end(self, result: RunResult, waited: float, elapsed: float, share: int) -> str:
        """Persist the result before the parent sees it."""
        runtime, log = self.runtime, self.runtime.log
        handle = f"result:{self.task}"
        runtime.outcomes[str(result.outcome)] += 1
        content, truncated = shorten(self._wording(result), share, handle)
        usage = result.usage
        limit = {"limit": result.limit} if result.limit else {}
        log.write_result(
            handle, "result", "task.end", span=self.task, parent=self.call_id, task=self.task, agent=self.agent,
            outcome=result.outcome, reason=result.reason, **limit, seconds=result.seconds,
            queue_seconds=waited + result.queue_seconds, steps=result.steps, critical_steps=result.critical_steps,
            tokens_in=usage.tokens_in, tokens_out=usage.tokens_out, tokens_cached=usage.tokens_cached, cost=usage.cost,
            total_tokens=result.total_tokens, result=result.text, handle=handle, delivered=len(content),
        )  # fmt: skip
        log.write("tool.result", span=self.call_id, parent=self.owner.id, call=self.call_id, agent=self.owner.id,
                  name=self.call.name, outcome=result.outcome, reason=result.reason, seconds=elapsed, content=content,
                  chars=len(result.text), truncated=truncated, handle=handle, evidence=[], data={},
                  task=self.task)  # fmt: skip
        try:
            await log.commit()
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None:
                current.uncancel()
        return content

    def _wording(self, result: RunResult) -> str:
        """The final message, or a header that says what is missing and then the partial text."""
        answers = _ANSWER.findall(result.text)
        text = answers[-1].strip() if answers else result.text
        if result.outcome == Outcome.COMPLETED:
            return text
        header = f"[{self.agent} {self.task}: {result.outcome}: {result.reason}]"
        return f"{header}\nPartial, not a final answer:\n{text}" if text.strip() else header


@asynccontextmanager
async def slot_lent(run: AgentRun, batch: int) -> AsyncIterator[None]:
    """A sub-agent that waits for its own children lends them its slot (or deep trees would deadlock) and is not on
    its own run time meanwhile: each child has a deadline itself."""
    if not (run.holds_slot and batch):
        yield
        return
    run.runtime.slots.release()
    run.holds_slot = False
    run.scope.pause()
    yield  # a cancellation passes through here: who is stopped needs no slot to end
    await run.runtime.slots.acquire()
    run.holds_slot = True
    run.scope.resume()


def stop_on_quota(run: AgentRun) -> None:
    """After a batch: when the sub-agents' endpoint is out of quota, stop the run here, where it can be resumed,
    instead of letting the orchestrator answer from what little there is."""
    closed = run.runtime.limiters.get(run.runtime.subagent_client.endpoint).closed
    if closed is not None:
        raise ModelError(closed.kind, str(closed), status=closed.status)
