"""One agent's run: a fresh private context, turns of model and tools, one final message, one typed outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import delegation
from .context import ContextMeter, tools_tokens
from .limits import LimitReached, Limits, stage_cost, steps_of
from .resume import EMPTY_REPLY
from .runtime import Runtime
from .scope import Scope
from .types import Message, ModelClient, ModelError, ModelReply, Outcome, Tool, ToolCall, ToolSpec, Usage, spec_of


@dataclass(slots=True)
class RunResult:
    """How an agent's run ended. text: its final message, or the best partial one when ``outcome`` is not completed.

    steps: model turns (or tool calls, by ``Limits.counting``). critical_steps: for an agent that delegates, of its
    stages; else its steps. usage: its own model calls; total_tokens: with its descendants. external: cancelled by
    someone outside the run, who still has to be told.
    """

    outcome: Outcome
    text: str
    reason: str = ""
    limit: str | None = None
    steps: int = 0
    critical_steps: int = 0
    usage: Usage = Usage()
    total_tokens: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    external: bool = False


class AgentRun:
    """Runs one agent to its end. It is made anew for every assignment and keeps nothing afterwards.

    max_steps: (number, name of the limit it comes from).
    """

    def __init__(
        self, runtime: Runtime, *, id: str, client: ModelClient, system_prompt: str, prompt: str,
        tools: Sequence[Tool], limits: Limits, scope: Scope, max_steps: tuple[int, str], depth: int = 0,
    ):  # fmt: skip
        self.runtime, self.id, self.client, self.limits, self.scope = runtime, id, client, limits, scope
        self.max_steps, self.depth = max_steps, depth
        self.delegates = limits.depth > 0
        self.staged = self.delegates or id == "main"
        self.tools: dict[str, Tool] = {tool.name: tool for tool in tools}
        self.specs: list[ToolSpec] = [spec_of(tool) for tool in tools]
        if self.delegates:
            reader = delegation.ReadResult(runtime.log)
            self.tools.setdefault(reader.name, reader)
            self.specs += [*delegation.SPECS, spec_of(reader)]
        self.agents: dict[str, str] = {}  # created agents: name -> system prompt
        system = "\n\n".join(part for part in (system_prompt, limits.state_to_model(delegates=self.delegates)) if part)
        self.messages: list[Message] = []
        self.context = ContextMeter(client.context_window, limits.reply_tokens)
        self.context.used = tools_tokens(self.specs)
        self._say(Message("system", system))
        self._say(Message("user", prompt))
        self.steps, self.critical, self.calls = 0, 0, 0
        self.usage, self.total_tokens, self.queued = Usage(), 0, 0.0
        self.note = ""  # what the runtime added to the last message, for the log
        self.holds_slot = False

    def _say(self, message: Message) -> None:
        self.messages.append(message)
        self.context.add(message)

    async def run(self) -> RunResult:
        """Never raises for what happens inside the run; a cancellation becomes a typed outcome too."""
        self.scope.attach()
        self.scope.resume()
        result = RunResult(Outcome.FAILED, "")
        try:
            result = RunResult(Outcome.COMPLETED, await self._turns())
        except LimitReached as error:
            self.runtime.tell_limit(error, self.id)
            result = RunResult(Outcome.LIMIT, self._partial(), str(error), error.limit)
        except ModelError as error:
            result = self._model_failure(error)
        except asyncio.CancelledError:
            result = self._cancelled()
        except Exception as error:  # never lose the siblings to a bug; the reason names it
            result = RunResult(Outcome.FAILED, self._partial(), f"{type(error).__name__}: {error}")
        finally:
            self.scope.close()
        return replace(result, steps=self.steps, critical_steps=self._critical(result), usage=self.usage,
                       total_tokens=self.total_tokens + self.usage.tokens, seconds=self.scope.ran,
                       queue_seconds=self.queued)  # fmt: skip

    def _critical(self, result: RunResult) -> int:
        """Stages of an agent that acts for itself; a leaf's steps. A child's final message is a step of its own, the
        orchestrator's is none: it acts on nothing."""
        if not self.staged:
            return self.steps
        return self.critical + (result.outcome == Outcome.COMPLETED and self.id != "main")

    def _model_failure(self, error: ModelError) -> RunResult:
        if error.kind in ("quota", "context"):
            limit = LimitReached(error.kind, None, None, f"{error.kind}: {error}")
            self.runtime.tell_limit(limit, self.id)
            return RunResult(Outcome.LIMIT, self._partial(), str(limit), error.kind)
        outcome = Outcome.TIMED_OUT if error.kind == "timeout" else Outcome.FAILED
        return RunResult(outcome, self._partial(), f"{error.kind}: {error}")

    def _cancelled(self) -> RunResult:
        task, cause = asyncio.current_task(), self.scope.cause
        if task is not None:
            task.uncancel()
        if cause is None:
            return RunResult(Outcome.CANCELLED, self._partial(), "cancelled from outside the run", external=True)
        if cause.limit is not None:
            self.runtime.tell_limit(LimitReached(cause.limit, None, None, cause.reason), self.id)
        return RunResult(cause.outcome, self._partial(), cause.reason, cause.limit)

    def _partial(self) -> str:
        """The last thing this agent said: never presented as complete, since the outcome travels with it."""
        said = (message.content for message in reversed(self.messages) if message.role == "assistant")
        return next((text for text in said if text.strip()), "")

    async def _turns(self) -> str:
        turn, empty = 0, False
        while True:
            turn += 1
            self._check(turn)
            reply = await self.runtime.model_call(self, turn)
            self.steps += steps_of(len(reply.tool_calls), self.limits.counting)
            self._say(replace(reply.message, trace=reply.trace))
            self.context.measured(reply.usage.tokens_in, reply.usage.tokens_out)
            if reply.tool_calls:
                await self._act(turn, reply.tool_calls)
            elif reply.finish_reason == "length":
                raise LimitReached("reply_tokens", self.limits.reply_tokens, reply.usage.tokens_out,
                                   "the final message was cut at the reply's token limit")  # fmt: skip
            elif reply.content.strip():
                return reply.content
            elif empty:
                raise ModelError("bad_reply", "two replies without text or tool calls")
            else:
                self._say(Message("user", EMPTY_REPLY))
            empty = not reply.tool_calls

    def _check(self, turn: int) -> None:
        most, name = self.max_steps
        if self.steps >= most:
            raise LimitReached(name, most, self.steps)
        ceiling = self.limits.critical_steps
        if self.staged and ceiling is not None and self.critical >= ceiling:
            raise self.runtime.budget.stop("critical_steps", ceiling, self.critical)
        if self.context.remaining <= 0:
            raise LimitReached("context", self.context.window, self.context.used,
                               f"the context window of {self.context.window} tokens is full")  # fmt: skip

    def with_ids(self, reply: ModelReply) -> ModelReply:
        """Fill in missing call ids and make repeated ones unique; ids that are given stay as they are."""
        seen: set[str] = set()
        calls = []
        for call in reply.tool_calls:
            id = call.id or f"functions.{call.name}:{self.calls}"
            while id in seen:
                id += "'"
            seen.add(id)
            self.calls += 1
            calls.append(call if id == call.id else ToolCall(id, call.name, call.arguments))
        return replace(reply, message=replace(reply.message, tool_calls=tuple(calls))) if calls else reply

    async def _act(self, turn: int, calls: Sequence[ToolCall]) -> None:
        """Do what one reply asks for: creations first, then everything else at once; results in call order."""
        results: list[str] = [""] * len(calls)
        sub_steps: list[int] = []
        pending = []
        share = self.context.share(len(calls))
        batch = 0
        for index, call in enumerate(calls):
            if index >= self.limits.calls_per_turn:
                results[index] = delegation.refuse(self, turn, index, call)
            elif self.delegates and call.name == "create_subagent":
                results[index] = delegation.create(self, turn, index, call)
        for index, call in enumerate(calls[: self.limits.calls_per_turn]):
            if self.delegates and call.name == "create_subagent":
                continue
            if self.delegates and call.name == "assign_task":
                pending.append((index, delegation.assign(self, turn, index, batch, call, share, sub_steps)))
                batch += 1
            else:
                pending.append((index, self.runtime.tool_call(self, turn, index, call, share)))
        try:
            if len(pending) == 1 and not batch:  # the usual turn of a sub-agent: no task of its own needed
                results[pending[0][0]] = await pending[0][1]
            elif pending:
                async with delegation.slot_lent(self, batch), asyncio.TaskGroup() as group:
                    for index, work in pending:
                        group.create_task(_keep(results, index, work))
        finally:
            if self.staged:
                self._stage(turn, len(calls) - batch, sub_steps)
        if self.max_steps[0] - self.steps == 1:
            self.note = LAST_TURN
            results[-1] += LAST_TURN
        for call, content in zip(calls, results, strict=True):
            self._say(Message("tool", content, tool_call_id=call.id))
        if batch:
            delegation.stop_on_quota(self)

    def _stage(self, turn: int, own: int, sub_steps: list[int]) -> None:
        main, critical = stage_cost(own, sub_steps, self.limits.counting)
        self.critical += critical
        recorded = self.runtime.recorded
        if (self.id, turn) not in recorded.staged or (sub_steps and not recorded.consumed(self.id, turn)):
            self.runtime.log.write("stage", span=self.id, agent=self.id, turn=turn, main_steps=main,
                                   sub_steps=list(sub_steps), critical_steps=critical)  # fmt: skip


LAST_TURN = "\n[one turn is left: write your final answer now]"


async def _keep(results: list[str], index: int, work: Any) -> None:
    results[index] = await work
