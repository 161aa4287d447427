"""What all agents of one run share, and the two things they do with it: call a model, call a tool."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import clock
from .context import message_tokens, shorten
from .limiter import CallRecord, Limiters
from .limits import Budget, LimitReached, Limits
from .log import SwarmLog
from .resume import Recorded
from .scope import Scope, bounded
from .types import (
    ModelClient,
    ModelError,
    ModelReply,
    ModelRequest,
    Outcome,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    Usage,
)

if TYPE_CHECKING:
    from .agent import AgentRun

Observer = Callable[[str, ModelRequest, ModelReply], None]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling fields sent with every call; None leaves the server's default."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    extra: Mapping[str, Any] | None = None


@dataclass
class Runtime:
    """The shared state of one run. ``observer`` is called with every new reply (run id, request, reply)."""

    log: SwarmLog
    limits: Limits
    limiters: Limiters
    budget: Budget
    recorded: Recorded
    subagent_client: ModelClient
    subagent_tools: tuple[Tool, ...]
    sampling: Sampling = field(default_factory=Sampling)
    workspace: Path | None = None
    observer: Observer | None = None
    remote: Any = None  # runs assignments elsewhere (Ray); None = in this process
    outcomes: Counter[str] = field(default_factory=Counter)
    scopes: dict[str, Scope] = field(default_factory=dict)
    abandoned: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.limits.concurrent)
        self._told: set[tuple[str, str]] = set()

    def tell_limit(self, error: LimitReached, scope: str) -> None:
        """Write a ``limit`` event, once for each limit and scope."""
        if (error.limit, scope) not in self._told:
            self._told.add((error.limit, scope))
            self.log.write("limit", span=scope, limit=error.limit, value=error.value, used=error.used, scope=scope,
                           message=str(error))  # fmt: skip

    def warn(self, message: str) -> None:
        self.log.write("warning", message=message)

    # -- model calls ------------------------------------------------------------------------------------------------

    async def model_call(self, run: AgentRun, step: int) -> ModelReply:
        """One model call of ``run``: from the record if it was paid for, else through the rate limiter.

        Raises :class:`LimitReached`, :class:`ModelError` or ``CancelledError``; each leaves a ``model.reply`` event.
        """
        call = f"{run.id}#{step}"
        recorded = self.recorded.replies.get(call)
        if recorded is not None:
            return run.with_ids(recorded)
        estimate = run.context.used
        self.budget.reserve(estimate)
        client, record, usage = run.client, CallRecord(), Usage()
        opening: dict[str, Any] = {"note": run.note} if run.note else {}
        if step == 1:
            opening["opening"] = [{"role": m.role, "content": m.content} for m in run.messages]
        self.log.write("model.call", span=call, parent=run.id, call=call, agent=run.id, step=step, **opening,
                       model=client.name, endpoint=client.endpoint, messages=len(run.messages),
                       tools=len(run.specs))  # fmt: skip
        request = self._request(run, step)
        end: dict[str, Any] = {"outcome": Outcome.FAILED, "reason": ""}
        try:
            run.scope.pause()  # waiting for the rate limiter is not run time
            limiter = self.limiters.get(client.endpoint)
            reply = run.with_ids(await limiter.call(lambda: self._attempt(run, request), record))
            usage = reply.usage if reply.usage.tokens else self._estimated(client, estimate, reply)
            end = self._reply_fields(call, reply)
            if usage is not reply.usage:
                end["estimated"] = True
        except ModelError as error:
            outcome = {"quota": Outcome.LIMIT, "context": Outcome.LIMIT, "timeout": Outcome.TIMED_OUT}.get(error.kind)
            end.update(outcome=outcome or Outcome.FAILED, reason=f"{error.kind}: {error}")
            raise
        except asyncio.CancelledError:
            cause = run.scope.cause
            end.update(outcome=cause.outcome if cause else Outcome.CANCELLED, reason=cause.reason if cause else "")
            raise
        finally:
            run.scope.resume()
            run.queued += record.queued
            usage = usage + record.wasted
            run.usage = run.usage + usage
            self.budget.settle(estimate, usage)
            self.log.write("model.reply", span=call, parent=run.id, call=call, agent=run.id, step=step, **end,
                           tokens_in=usage.tokens_in, tokens_out=usage.tokens_out, tokens_cached=usage.tokens_cached,
                           cost=usage.cost, seconds=record.seconds, queue_seconds=record.queued,
                           attempts=record.attempts, retries=record.retries)  # fmt: skip
            self.log.commit_soon()
        if self.observer is not None:
            self.observer(run.id, request, reply)
        return reply

    def _estimated(self, client: ModelClient, tokens_in: int, reply: ModelReply) -> Usage:
        """Usage for a server that reports none, so that token limits hold; said once."""
        if ("usage", client.endpoint) not in self._told:
            self._told.add(("usage", client.endpoint))
            self.warn(f"{client.endpoint} reports no token usage: tokens are estimates, the cost is unknown")
        return Usage(tokens_in, message_tokens(reply.message))

    def _request(self, run: AgentRun, step: int) -> ModelRequest:
        sampling = self.sampling
        return ModelRequest(tuple(run.messages), run.specs, temperature=sampling.temperature, top_p=sampling.top_p,
                            max_tokens=self.limits.reply_tokens, seed=sampling.seed, extra=sampling.extra,
                            agent=run.id, step=step)  # fmt: skip

    async def _attempt(self, run: AgentRun, request: ModelRequest) -> ModelReply:
        limits = self.limits
        run.scope.resume()
        try:
            work = run.client.complete(request)
            return await bounded(
                work, limits.model_seconds, limits.grace_seconds, self._abandon(f"{run.id} model call")
            )
        except TimeoutError:
            message = f"{run.client.endpoint} gave no reply within model_seconds = {limits.model_seconds:g}"
            raise ModelError("timeout", message) from None
        except (ModelError, asyncio.CancelledError):
            raise
        except Exception as error:  # a client's own bug must not end the siblings
            raise ModelError("bad_request", f"the client raised {type(error).__name__}: {error}") from error
        finally:
            run.scope.pause()

    def _reply_fields(self, call: str, reply: ModelReply) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "outcome": Outcome.COMPLETED, "reason": "", "model": reply.model, "finish_reason": reply.finish_reason,
            "content": reply.content,
            "tool_calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in reply.tool_calls],
        }  # fmt: skip
        if reply.message.reasoning:
            fields["reasoning"] = reply.message.reasoning
        trace = self.log.write_trace(call, reply.trace)
        if trace is not None:
            fields["trace"] = trace
        return fields

    def _abandon(self, what: str) -> Callable[[asyncio.Task[Any]], None]:
        def abandon(task: asyncio.Task[Any]) -> None:
            self.abandoned.append(what)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self.warn(f"{what} ignored its cancellation for {self.limits.grace_seconds:g} s and was left behind")

        return abandon

    # -- direct tool calls ------------------------------------------------------------------------------------------

    async def tool_call(self, run: AgentRun, turn: int, index: int, call: ToolCall, share: int) -> str:
        """Run one direct tool and return the text for the model; errors become texts, cancellation passes through."""
        id = f"{run.id}#{turn}.{index}"
        recorded = self.recorded.result(id, run.id, turn)
        if recorded is not None:
            if recorded.get("full") is not None:
                self.log.remember(f"result:{id}", recorded["full"])
            return recorded["content"]
        self.log.write("tool.call", span=id, parent=run.id, call=id, agent=run.id, step=turn, index=index,
                       name=call.name, arguments=call.arguments, tool_call_id=call.id)  # fmt: skip
        began = clock.now()
        result, reason = ToolResult("", Outcome.CANCELLED), ""
        try:
            result, reason = await self._run_tool(run, id, call)
        except asyncio.CancelledError:
            cause = run.scope.cause
            reason = cause.reason if cause else "cancelled"
            result = ToolResult(f"[{Outcome.CANCELLED}: {reason}]", Outcome.CANCELLED)
            raise
        finally:
            content = self._write_result(run, id, call.name, result, reason, clock.now() - began, share)
        return content

    async def _run_tool(self, run: AgentRun, id: str, call: ToolCall) -> tuple[ToolResult, str]:
        tool = run.tools.get(call.name)
        arguments = parse_arguments(call)
        if tool is None:
            known = ", ".join(sorted(spec.name for spec in run.specs)) or "none"
            arguments = f"no tool is called {call.name!r}; your tools: {known}"
        if isinstance(arguments, str):
            return ToolResult(f"Error: {arguments}", Outcome.FAILED), arguments
        assert tool is not None
        seconds = tool.timeout if tool.timeout is not None else self.limits.tool_seconds
        context = ToolContext(run.id, id, self.workspace, seconds)
        try:
            work = tool.call(arguments, context)
            grace = self.limits.grace_seconds
            result = await bounded(work, seconds, grace, self._abandon(f"{run.id} tool {call.name}"))
        except TimeoutError:
            reason = f"{call.name} did not finish within {seconds:g} s"
            return ToolResult(f"Error: {reason}", Outcome.TIMED_OUT), reason
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a tool's failure is the model's to handle
            reason = f"{type(error).__name__}: {error}"
            return ToolResult(f"Error: {reason}", Outcome.FAILED), reason
        return result, "" if result.outcome == Outcome.COMPLETED else result.content[:500]

    def _write_result(
        self, run: AgentRun, id: str, name: str, result: ToolResult, reason: str, seconds: float, share: int
    ) -> str:
        handle = f"result:{id}"
        reader = handle if "read_result" in run.tools else None
        content, truncated = shorten(result.content, share, reader)
        fields: dict[str, Any] = {
            "call": id, "agent": run.id, "name": name, "outcome": result.outcome, "reason": reason, "seconds": seconds,
            "content": content, "chars": len(result.content), "truncated": truncated,
            "evidence": list(result.evidence), "data": dict(result.data),
        }  # fmt: skip
        if truncated:
            self.log.write_result(handle, "full", "tool.result", span=id, parent=run.id, **fields, handle=handle,
                                  full=result.content)  # fmt: skip
        else:
            self.log.write("tool.result", span=id, parent=run.id, **fields)
        return content


def parse_arguments(call: ToolCall) -> Mapping[str, Any] | str:
    """The arguments as an object, or a sentence for the model about what is wrong with them."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as error:
        return f"the arguments of {call.name} are not valid JSON ({error})"
    if not isinstance(arguments, dict):
        return f"the arguments of {call.name} must be a JSON object, not {type(arguments).__name__}"
    return arguments
