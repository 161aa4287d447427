"""What the parts of a swarm say to each other: messages, tools, model clients, outcomes.

Everything here is plain data or a protocol: no I/O, no torch. The wire form is OpenAI Chat Completions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from triscale.config import TriScaleError

if TYPE_CHECKING:
    from pathlib import Path

Role = Literal["system", "user", "assistant", "tool"]


class Outcome(StrEnum):
    """How an assignment, a tool call or a whole run ended. Exactly one of these, never silence."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    LIMIT = "limit"  # a limit stopped it; the reason names which one and its value
    CANCELLED = "cancelled"
    NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model asked for. ``arguments`` is the JSON *string* of the wire, which may be malformed."""

    id: str
    name: str
    arguments: str = "{}"

    def to_wire(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    reasoning: the model's ``reasoning_content``; sent back during a tool loop, as thinking models require.
    trace: whatever the client put in :attr:`ModelReply.trace` for this assistant message. The in-process engine uses
        it to continue from the sampled tokens instead of encoding the text again. Never sent over HTTP.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    trace: TokenTrace | None = field(default=None, compare=False, repr=False)

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            wire["tool_calls"] = [call.to_wire() for call in self.tool_calls]
            if not self.content:
                wire["content"] = None
        if self.tool_call_id is not None:
            wire["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            wire["name"] = self.name
        if self.reasoning:
            wire["reasoning_content"] = self.reasoning
        return wire


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What the model is told about a tool; ``parameters`` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def to_wire(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one model call and what it cost (in the currency of the price table; 0 without one)."""

    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.tokens_in + other.tokens_in,
            self.tokens_out + other.tokens_out,
            self.tokens_cached + other.tokens_cached,
            self.cost + other.cost,
        )

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """What reinforcement learning needs of a sampled reply, opaque to the swarm.

    prompt_ids: tokens the model read. token_ids, logprobs: tokens it sampled and their log-probabilities at sampling.
    weight_version: the weights that sampled them.
    """

    prompt_ids: Any = None
    token_ids: Any = None
    logprobs: Any = None
    weight_version: int | str | None = None


@dataclass(slots=True)
class ModelRequest:
    """One model call.

    agent: id of the calling run ("main" or a task id); step: its turn, from 1. Clients that speak HTTP ignore both,
    scripted and in-process clients may use them. Sampling fields left None are not sent.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    tool_choice: Any = None
    stop: Sequence[str] | None = None
    seed: int | None = None
    extra: Mapping[str, Any] | None = None
    agent: str = "main"
    step: int = 1


@dataclass(frozen=True, slots=True)
class ModelReply:
    """One answer of a model. finish_reason: stop, length, tool_calls or content_filter."""

    message: Message
    finish_reason: str = "stop"
    usage: Usage = Usage()
    model: str = ""
    trace: TokenTrace | None = None

    @property
    def content(self) -> str:
        return self.message.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.message.tool_calls


@runtime_checkable
class ModelClient(Protocol):
    """Anything that answers messages: an HTTP endpoint, the in-process engine, a script.

    name: the model's name. endpoint: identifies the rate limit it shares (endpoint and key, never the key itself).
    context_window: tokens, or None if unknown. ``complete`` makes one attempt and raises :class:`ModelError`;
    waiting, retrying, timeouts and counting are the runtime's. It must be safe to call concurrently and to cancel.
    """

    name: str
    endpoint: str
    context_window: int | None

    async def complete(self, request: ModelRequest) -> ModelReply: ...

    async def close(self) -> None: ...


ErrorKind = Literal[
    "rate_limited",  # try again later; retry_after in seconds if the server said
    "quota",  # no money or quota left: trying again is pointless
    "auth",  # the key is missing or wrong
    "transient",  # server error, refused connection, cut stream: try again
    "timeout",  # no reply within Limits.model_seconds
    "bad_request",  # the server refuses this request
    "bad_reply",  # the reply is not what the protocol says
    "context",  # the request is longer than the model's window
]


class ModelError(TriScaleError):
    """A model call failed. ``usage`` holds what was paid for nevertheless, if the server said."""

    def __init__(
        self, kind: ErrorKind, message: str, *, retry_after: float | None = None, status: int | None = None,
        usage: Usage | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.retry_after, self.status, self.usage = retry_after, status, usage


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returns.

    content: the text for the model (the runtime shortens it to the caller's context and keeps the whole by handle).
    outcome: COMPLETED, or what went wrong; a failing tool returns FAILED with the reason as content, or raises.
    evidence: ids of the documents, pages or files this result rests on; goes to the log, not to the model.
    data: anything else JSON-able for the log.
    """

    content: str
    outcome: Outcome = Outcome.COMPLETED
    evidence: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ToolContext:
    """Who calls a tool.

    agent: id of the calling run. call: id of this call, unique in the run and the same again after a resume.
    workspace: the run's folder for files, if it has one. remaining_seconds: until the tool's timeout.
    """

    agent: str
    call: str
    workspace: Path | None = None
    remaining_seconds: float | None = None


@runtime_checkable
class Tool(Protocol):
    """A tool an agent may call. One object serves all agents at once, so ``call`` keeps no per-agent state.

    timeout: seconds, or None for ``Limits.tool_seconds``. ``call`` gets the parsed arguments (a JSON object, not yet
    checked against the schema) and must let :class:`asyncio.CancelledError` through; exceptions become a FAILED result.
    ``close`` is called once, after the run.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    timeout: float | None

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult: ...

    async def close(self) -> None: ...


def spec_of(tool: Tool) -> ToolSpec:
    return ToolSpec(tool.name, tool.description, tool.parameters)


@runtime_checkable
class World(Protocol):
    """A task with its tools and a way to score the answer (:mod:`triscale.swarm.worlds`).

    scripted: a client that plays ``orchestrator``, ``subagent`` or ``single`` (the twin without delegation).
    score: numbers by name, for example ``{"item_f1": 0.9, "row_f1": 0.8, "success": 0.0}``.
    """

    name: str
    question: str

    @property
    def tools(self) -> Sequence[Tool]: ...

    def scripted(self, role: Literal["orchestrator", "subagent", "single"]) -> ModelClient: ...

    def score(self, answer: str) -> dict[str, float]: ...


Policy = Callable[[ModelRequest], "ModelReply | Awaitable[ModelReply]"]
