"""A model client that fails in every way real endpoints do, reproducibly, around any other client."""

from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import dataclass, fields

from triscale.config import ConfigError

from .types import Message, ModelClient, ModelError, ModelReply, ModelRequest, ToolCall, Usage


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Probabilities of each failure of one attempt; at most one happens, else the inner client answers.

    rate_limited: 429, half of them with Retry-After. server_error: 500. refused: no connection. cut: the stream ends
    in the middle, tokens paid. hang: no reply until cancelled. stubborn: a hang that ignores its first cancellation.
    malformed: tool calls with broken JSON. unknown_tool: a call of a tool that does not exist. empty: no text, no
    calls. truncated: finish_reason length. same_ids: all calls with one id. crash: the client itself raises.
    quota: the key is exhausted from then on. delay: seconds added at most to an answered call.
    """

    rate_limited: float = 0.0
    server_error: float = 0.0
    refused: float = 0.0
    cut: float = 0.0
    hang: float = 0.0
    stubborn: float = 0.0
    malformed: float = 0.0
    unknown_tool: float = 0.0
    empty: float = 0.0
    truncated: float = 0.0
    same_ids: float = 0.0
    crash: float = 0.0
    quota: float = 0.0
    delay: float = 0.0

    def __post_init__(self) -> None:
        total = sum(getattr(self, name) for name in self.kinds())
        if total > 1.0 + 1e-9:
            raise ConfigError("chaos", f"the probabilities add up to {total:g}", "Keep their sum at 1 or below")

    @classmethod
    def kinds(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "delay"]


class ChaosClient:
    """Wraps ``inner``. What happens to an attempt depends only on the seed, the agent, the step and how many attempts
    that step has had, never on the order in which concurrent calls arrive."""

    def __init__(self, inner: ModelClient, chaos: Chaos, seed: int = 0):
        self.inner, self.chaos, self.seed = inner, chaos, seed
        self.name, self.endpoint, self.context_window = inner.name, inner.endpoint, inner.context_window
        self.happened: list[tuple[str, int, str]] = []
        self._attempts: dict[tuple[str, int], int] = {}
        self._exhausted = False

    async def complete(self, request: ModelRequest) -> ModelReply:
        key = (request.agent, request.step)
        attempt = self._attempts[key] = self._attempts.get(key, 0) + 1
        luck = random.Random(zlib.crc32(f"{self.seed} {request.agent} {request.step} {attempt}".encode()))
        kind = self._draw(luck)
        if self._exhausted:
            kind = "quota"
        self.happened.append((*key, kind))
        await self._fail(kind, luck)
        await asyncio.sleep(luck.random() * self.chaos.delay)
        return self._spoil(kind, await self.inner.complete(request))

    def _draw(self, luck: random.Random) -> str:
        point = luck.random()
        for kind in Chaos.kinds():
            point -= getattr(self.chaos, kind)
            if point < 0:
                return kind
        return "answered"

    async def _fail(self, kind: str, luck: random.Random) -> None:
        if kind == "rate_limited":
            after = luck.choice([None, luck.uniform(0.5, 20.0)])
            raise ModelError("rate_limited", "429 Too Many Requests", retry_after=after, status=429)
        if kind == "server_error":
            raise ModelError("transient", "500 Internal Server Error", status=500)
        if kind == "refused":
            raise ModelError("transient", "connection refused")
        if kind == "cut":
            await asyncio.sleep(luck.random())
            raise ModelError("transient", "the stream was cut", usage=Usage(tokens_in=10, tokens_out=3))
        if kind == "quota":
            self._exhausted = True
            raise ModelError("quota", "403 quota exhausted", status=403)
        if kind == "crash":
            raise ZeroDivisionError("a bug in the client")
        if kind in ("hang", "stubborn"):
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                if kind == "hang":
                    raise
                await asyncio.sleep(1.0)
                raise

    def _spoil(self, kind: str, reply: ModelReply) -> ModelReply:
        message, finish = reply.message, reply.finish_reason
        calls = message.tool_calls
        if kind == "malformed" and calls:
            calls = tuple(ToolCall(c.id, c.name, c.arguments[:-1] + "'") for c in calls)
        elif kind == "unknown_tool":
            calls = (*calls, ToolCall("", "no_such_tool", "{}"))
        elif kind == "same_ids":
            calls = tuple(ToolCall("call_0", c.name, c.arguments) for c in calls)
        elif kind == "empty":
            return ModelReply(Message("assistant", ""), "stop", reply.usage, reply.model)
        elif kind == "truncated":
            return ModelReply(Message("assistant", message.content[:3]), "length", reply.usage, reply.model)
        return ModelReply(Message("assistant", message.content, calls), finish, reply.usage, reply.model, reply.trace)

    async def close(self) -> None:
        await self.inner.close()
