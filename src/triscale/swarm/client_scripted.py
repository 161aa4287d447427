"""Model clients without a model: a policy in Python, a fixed script, an echo. For tests, worlds and dry runs."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triscale.config import TriScaleError

from .context import message_tokens, tools_tokens
from .types import Message, ModelReply, ModelRequest, Policy, ToolCall, Usage

Latency = float | Callable[[ModelRequest, ModelReply], float]


def say(content: str) -> ModelReply:
    """A final message."""
    return ModelReply(Message("assistant", content))


def call(name: str, arguments: Mapping[str, Any] | str | None = None, id: str = "") -> ToolCall:
    """A tool call for :func:`act`; a string is sent as it is (so that it may be malformed)."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCall(id, name, text)


def act(*calls: ToolCall, content: str = "") -> ModelReply:
    """A turn that calls tools; the runtime fills in the ids."""
    return ModelReply(Message("assistant", content, tuple(calls)), "tool_calls")


class PolicyClient:
    """Answers with ``policy(request)``, a plain or async function, after ``latency`` seconds of the loop's clock.

    Token counts are estimates unless the reply brings its own; cached tokens are the part of the prompt that was
    already in this agent's previous request. prices: (input, output, cached input) for a million tokens.
    """

    def __init__(
        self, policy: Policy, *, name: str = "scripted", latency: Latency = 0.0, context_window: int | None = None,
        prices: tuple[float, float, float] = (0.0, 0.0, 0.0), endpoint: str = "scripted",
    ):  # fmt: skip
        self.policy, self.name, self.latency, self.prices = policy, name, latency, prices
        self.context_window, self.endpoint = context_window, endpoint
        self.calls = 0
        self._read: dict[str, int] = {}

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.calls += 1
        answer = self.policy(request)
        reply = await answer if inspect.isawaitable(answer) else answer
        seconds = self.latency(request, reply) if callable(self.latency) else self.latency
        if seconds > 0:
            await asyncio.sleep(seconds)
        usage = reply.usage if reply.usage.tokens else self._usage(request, reply)
        return ModelReply(reply.message, reply.finish_reason, usage, reply.model or self.name, reply.trace)

    def _usage(self, request: ModelRequest, reply: ModelReply) -> Usage:
        tokens_in = tools_tokens(request.tools) + sum(map(message_tokens, request.messages))
        tokens_out = message_tokens(reply.message)
        cached = min(self._read.get(request.agent, 0), tokens_in) if request.step > 1 else 0
        if reply.tool_calls:
            self._read[request.agent] = tokens_in
        else:
            self._read.pop(request.agent, None)
        return Usage(tokens_in, tokens_out, cached, price(self.prices, tokens_in, tokens_out, cached))

    async def close(self) -> None:
        pass


def price(prices: tuple[float, float, float], tokens_in: int, tokens_out: int, cached: int) -> float:
    """What a call costs by a price table of (input, output, cached input) for a million tokens."""
    return ((tokens_in - cached) * prices[0] + tokens_out * prices[1] + cached * prices[2]) / 1e6


class ScriptedClient(PolicyClient):
    """Plays fixed replies: one list for each agent id (``main``, ``t1.0``), or one list for all in order of calling.

    Asking beyond a script's end raises; :meth:`finished` raises when replies were never asked for.
    """

    def __init__(self, script: Mapping[str, Sequence[ModelReply]] | Sequence[ModelReply], **options: Any):
        super().__init__(self._next, **options)
        self.scripts = {key: list(replies) for key, replies in script.items()} if isinstance(script, Mapping) else None
        self.replies = [] if isinstance(script, Mapping) else list(script)

    def _next(self, request: ModelRequest) -> ModelReply:
        if self.scripts is None:
            replies = self.replies
        else:
            replies = self.scripts.get(request.agent) or self.scripts.get("*", [])
        if not replies:
            raise TriScaleError(f"the script of {request.agent} has no reply for its step {request.step}")
        return replies.pop(0)

    def finished(self) -> None:
        left = {key: len(replies) for key, replies in (self.scripts or {"all": self.replies}).items() if replies}
        if left:
            raise TriScaleError(f"the script was not played to its end: {left} replies are left")


class EchoClient(PolicyClient):
    """Answers with the last user message."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        latency: float = 0.0
        context_window: int | None = None

        def build(self) -> EchoClient:
            return EchoClient(latency=self.latency, context_window=self.context_window)

    def __init__(self, **options: Any):
        super().__init__(_echo, **{"name": "echo", "endpoint": "echo", **options})


def _echo(request: ModelRequest) -> ModelReply:
    users = [message.content for message in request.messages if message.role == "user"]
    return say(users[-1] if users else "")
