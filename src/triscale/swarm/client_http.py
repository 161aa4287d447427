"""A lean client for OpenAI-compatible Chat Completions endpoints, on aiohttp.

One attempt a call: waiting, retrying and counting belong to the runtime. The key comes from the environment and goes
nowhere but into the request's header.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import time
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from triscale.config import ConfigError, require

from .client_scripted import price
from .types import Message, ModelError, ModelReply, ModelRequest, ToolCall, Usage

QUOTA_WORDS = ("insufficient_quota", "quota exceeded", "exceeded your current quota", "billing", "insufficient balance",
               "credit")  # fmt: skip
CONTEXT_WORDS = ("context_length", "context length", "context size", "maximum context", "too many tokens", "n_ctx")


class HttpClient:
    """Speaks to ``{base_url}/chat/completions``; safe for any number of concurrent calls of one event loop."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """model: the name the server knows. base_url: up to and including ``/v1``. api_key_env: the environment
        variable that holds the key (not set = no key is sent). stream: read the reply as a stream, which notices a
        dead server between tokens: after idle_seconds without a byte the call fails and is tried again.
        context_window: tokens; None asks the server (``discover``). prices: (input, output, cached input) for a
        million tokens. extra: fields added to every request body.
        """

        model: str
        base_url: str
        api_key_env: str = "OPENAI_API_KEY"
        stream: bool = False
        context_window: int | None = None
        prices: tuple[float, ...] = (0.0, 0.0, 0.0)
        connect_seconds: float = 30.0
        idle_seconds: float = 120.0
        extra: dict[str, Any] | None = None

        def __post_init__(self) -> None:
            url = urlsplit(self.base_url)
            if url.scheme not in ("http", "https") or not url.netloc:
                raise ConfigError("base_url", f"{self.base_url!r} is not an HTTP address",
                                  "Write for example http://localhost:8000/v1")  # fmt: skip
            if not self.model:
                raise ConfigError("model", "is empty", "Name a model that the server knows (see its /v1/models)")
            if len(self.prices) != 3:
                raise ConfigError("prices", f"{self.prices!r} has {len(self.prices)} numbers",
                                  "Give three: input, output, cached input, each for a million tokens")  # fmt: skip

        def build(self) -> HttpClient:
            return HttpClient(self)

    def __init__(self, config: HttpClient.Config):
        self.config, self.name, self.context_window = config, config.model, config.context_window
        self._aiohttp: Any = require("aiohttp", "swarm", "the swarm's HTTP client")
        self._key = os.environ.get(config.api_key_env, "")
        self._url = config.base_url.rstrip("/") + "/chat/completions"
        # Two keys at one address have two rate limits; the checksum tells them apart and tells nobody the key.
        host = urlsplit(config.base_url)
        self.endpoint = f"{host.scheme}://{host.hostname}{f':{host.port}' if host.port else ''}{host.path.rstrip('/')}"
        if self._key:
            self.endpoint += f" key {zlib.crc32(self._key.encode()) & 0xFFFF:04x}"
        self._session: Any = None

    def _open(self) -> Any:
        if self._session is None:
            aio, config = self._aiohttp, self.config
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            timeout = aio.ClientTimeout(total=None, sock_connect=config.connect_seconds,
                                        sock_read=config.idle_seconds if config.stream else None)  # fmt: skip
            connector = aio.TCPConnector(limit=0, keepalive_timeout=60)
            self._session = aio.ClientSession(headers=headers, timeout=timeout, connector=connector)
        return self._session

    async def complete(self, request: ModelRequest) -> ModelReply:
        """One attempt; raises :class:`ModelError` whose kind says whether another one makes sense."""
        aio = self._aiohttp
        body = json.dumps(self._body(request), ensure_ascii=False).encode("utf-8", "replace")
        try:
            async with self._open().post(self._url, data=body) as response:
                if response.status != 200:
                    raise _refusal(response.status, response.headers, await response.text(errors="replace"))
                if self.config.stream:
                    return await self._read_stream(response)
                return self._reply(_parse_json(await response.read()))
        except aio.SocketTimeoutError as error:
            what = f"sent nothing for {self.config.idle_seconds:g} s" if self.config.stream else "did not connect"
            raise ModelError("transient", f"{self.endpoint} {what}") from error
        except (aio.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise ModelError("transient", f"{self.endpoint}: {type(error).__name__}: {error}") from error

    async def discover(self) -> None:
        """Fill in an unknown context window from ``/models``; silent when the server does not say."""
        if self.context_window is not None:
            return
        aio = self._aiohttp
        try:
            address = self.config.base_url.rstrip("/") + "/models"
            async with self._open().get(address, timeout=aio.ClientTimeout(total=10)) as response:
                models = (await response.json(content_type=None)).get("data", [])
        except (aio.ClientError, TimeoutError, OSError, ValueError, AttributeError):
            return
        named = [m for m in models if isinstance(m, dict) and m.get("id") == self.name] or models[:1]
        for model in named:
            meta = model.get("meta") or {}
            for value in (model.get("max_model_len"), model.get("context_length"), model.get("context_window"),
                          meta.get("n_ctx"), meta.get("n_ctx_train")):  # fmt: skip
                if isinstance(value, int) and value > 0:
                    self.context_window = value
                    return

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.name, "messages": [message.to_wire() for message in request.messages]}
        if request.tools:
            body["tools"] = [spec.to_wire() for spec in request.tools]
        for field in ("temperature", "top_p", "max_tokens", "tool_choice", "seed"):
            value = getattr(request, field)
            if value is not None:
                body[field] = value
        if request.stop:
            body["stop"] = list(request.stop)
        if self.config.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return body | dict(self.config.extra or {}) | dict(request.extra or {})

    def _reply(self, body: Mapping[str, Any]) -> ModelReply:
        try:
            choice = body["choices"][0]
            message = choice["message"]
        except (KeyError, IndexError, TypeError):
            raise ModelError("bad_reply", f"the reply holds no choices: {str(body)[:200]}") from None
        return self._assemble(
            _text(message.get("content")), message.get("reasoning_content") or message.get("reasoning"),
            [_tool_call(call) for call in message.get("tool_calls") or ()], choice.get("finish_reason"),
            body.get("usage"), body.get("model"),
        )  # fmt: skip

    def _assemble(
        self, content: str, reasoning: Any, calls: list[ToolCall], finish: Any, usage: Any, model: Any
    ) -> ModelReply:
        message = Message("assistant", content, tuple(calls), reasoning=reasoning or None)
        finish = finish or ("tool_calls" if calls else "stop")
        return ModelReply(message, finish, self._usage(usage), model or self.name)

    def _usage(self, usage: Any) -> Usage:
        if not isinstance(usage, dict):
            return Usage()
        tokens_in, tokens_out = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or usage.get("cached_tokens") or usage.get("prompt_cache_hit_tokens") or 0
        prices = self.config.prices
        return Usage(tokens_in, tokens_out, cached,
                     price((prices[0], prices[1], prices[2]), tokens_in, tokens_out, cached))  # fmt: skip

    async def _read_stream(self, response: Any) -> ModelReply:
        """Collect server-sent chunks; a stream without a finish reason was cut, whatever text has come."""
        content, reasoning, model = [], [], ""
        calls: dict[int, dict[str, str]] = {}
        finish = usage = None
        async for chunk in _chunks(response):
            if "error" in chunk:
                raise _refusal(_status_of(chunk["error"]), {}, json.dumps(chunk))
            usage, model = chunk.get("usage") or usage, chunk.get("model") or model
            for choice in chunk.get("choices") or ():
                if choice.get("index", 0) != 0:
                    continue
                delta = choice.get("delta") or {}
                content.append(delta.get("content") or "")
                reasoning.append(delta.get("reasoning_content") or delta.get("reasoning") or "")
                for piece in delta.get("tool_calls") or ():
                    _collect(calls, piece)
                finish = choice.get("finish_reason") or finish
        if finish is None:
            raise ModelError("transient", f"{self.endpoint} cut the stream", usage=self._usage(usage))
        made = [ToolCall(c["id"], c["name"], c["arguments"]) for _, c in sorted(calls.items())]
        return self._assemble("".join(content), "".join(reasoning), made, finish, usage, model)

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


def _text(content: Any) -> str:
    """Content may be null, or a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _tool_call(call: Any) -> ToolCall:
    try:
        function = call["function"]
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        return ToolCall(call.get("id") or "", function["name"], text)
    except (KeyError, TypeError, AttributeError):
        raise ModelError("bad_reply", f"not a tool call: {str(call)[:200]}") from None


def _collect(calls: dict[int, dict[str, str]], piece: Mapping[str, Any]) -> None:
    """Streamed calls are keyed by index: id and name come once, pieces of the arguments concatenate."""
    slot = calls.setdefault(piece.get("index", len(calls)), {"id": "", "name": "", "arguments": ""})
    function = piece.get("function") or {}
    slot["id"] = slot["id"] or piece.get("id") or ""
    slot["name"] = slot["name"] or function.get("name") or ""
    slot["arguments"] += function.get("arguments") or ""


async def _chunks(response: Any) -> AsyncIterator[dict[str, Any]]:
    """JSON payloads of a server-sent-event stream. Lines may be split anywhere and have any length."""
    rest = b""
    async for block in response.content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            line = line.strip()
            if not line.startswith(b"data:"):
                continue  # comments keep the connection alive
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return
            yield _parse_json(payload)


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError:
        raise ModelError("bad_reply", f"the reply is not JSON: {raw[:200]!r}") from None
    if not isinstance(body, dict):
        raise ModelError("bad_reply", f"the reply is not a JSON object: {raw[:200]!r}")
    return body


def _status_of(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _refusal(status: int, headers: Mapping[str, str], text: str) -> ModelError:
    """The kind of error behind an HTTP status and its body."""
    short, words = text[:500], text[:5000].lower()
    message = f"HTTP {status}: {short}"
    quota = any(word in words for word in QUOTA_WORDS)
    if status == 402 or (status in (403, 429) and quota):
        return ModelError("quota", message, status=status)
    if status in (401, 403):
        return ModelError("auth", message, status=status)
    if status in (429, 529) or (status == 503 and "Retry-After" in headers):
        return ModelError("rate_limited", message, status=status, retry_after=_retry_after(headers))
    if status in (400, 413, 422) and any(word in words for word in CONTEXT_WORDS):
        return ModelError("context", message, status=status)
    if status in (408, 409, 425) or status >= 500:
        return ModelError("transient", message, status=status)
    return ModelError("bad_request", message, status=status)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds from ``retry-after-ms`` or ``Retry-After`` (a number or an HTTP date); None if absent or nonsense."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        value = headers.get("Retry-After")
        if value is None:
            return None
        if value.strip()[:1].isdigit():
            return max(0.0, float(value))
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
