"""Scripted agents for look-up worlds: they read the question, really search and read the documents, and fill a table.

Each is a pure function of the conversation, so runs repeat exactly and a resumed run goes on where it stopped. They
play the three roles of a swarm; ``Scripted.style`` makes the orchestrator behave well or badly on purpose.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..config import ConfigError
from .client_scripted import PolicyClient
from .table_score import parse_table, render_table
from .types import Message, ModelReply, ModelRequest, ToolCall, Usage
from .world_text import ATTRIBUTES, OVERSEER, Attribute

if TYPE_CHECKING:
    from .worlds import Latency

Style = Literal["fan_out", "serial", "duplicate", "direct"]
CHARS_PER_TOKEN = 4
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """style: ``fan_out`` assigns all items in one turn, ``serial`` one item a turn, ``duplicate`` every item ``copies``
    times, ``direct`` delegates nothing. chunk: items of one assignment. calls_per_turn: tool calls a working agent
    makes in one turn (for different items)."""

    style: Style = "fan_out"
    chunk: int = 1
    copies: int = 2
    calls_per_turn: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk", "copies", "calls_per_turn"):
            if getattr(self, name) < 1:
                raise ConfigError(f"world.scripted.{name}", f"{getattr(self, name)} is too small", "Give at least 1")


@dataclass(frozen=True, kw_only=True)
class Price:
    """Money per million tokens of an imagined model, so that costs can be compared."""

    tokens_in: float = 0.6
    tokens_cached: float = 0.15
    tokens_out: float = 2.5

    def of(self, tokens_in: int, tokens_cached: int, tokens_out: int) -> float:
        fresh = tokens_in - tokens_cached
        return (fresh * self.tokens_in + tokens_cached * self.tokens_cached + tokens_out * self.tokens_out) / 1e6


class ScriptedAgent(PolicyClient):
    """A model client that plays one role. Tokens are characters / 4; whatever an earlier turn of the same conversation
    sent counts as cached."""

    def __init__(
        self, role: str, scripted: Scripted, latency: Latency, price: Price, *, seed: int = 0,
        context_window: int | None = None,
    ):  # fmt: skip
        if role not in ("orchestrator", "subagent", "single"):
            raise ConfigError("role", f"{role!r} is not a role", "Use orchestrator, subagent or single")
        self.role, self.scripted, self.times, self.price, self.seed = role, scripted, latency, price, seed
        super().__init__(self._reply, name=f"scripted-{role}", latency=self._seconds, context_window=context_window)

    def _reply(self, request: ModelRequest) -> ModelReply:
        message = self.decide(request)
        return ModelReply(message, "tool_calls" if message.tool_calls else "stop", self._spent(request, message))

    def _seconds(self, request: ModelRequest, reply: ModelReply) -> float:
        usage, times = reply.usage, self.times
        fresh = usage.tokens_in - usage.tokens_cached
        seconds = times.model + fresh * times.per_token_in + usage.tokens_out * times.per_token_out
        return times.of(seconds, f"{request.agent} {request.step}", self.seed)

    def decide(self, request: ModelRequest) -> Message:
        """The next message, at once and without waiting."""
        task = Task.read("\n".join(m.content for m in request.messages if m.role in ("user", "system")))
        tools = {spec.name for spec in request.tools}
        if self.role == "orchestrator" and self.scripted.style != "direct":
            return _orchestrate(task, request, self.scripted, "assign_task" in tools)
        return _work(task, request.messages, self.scripted.calls_per_turn, bool(tools & {"search", "open"}))

    def _spent(self, request: ModelRequest, message: Message) -> Usage:
        last = max((i for i, m in enumerate(request.messages) if m.role == "assistant"), default=0)
        tools = sum(len(json.dumps(dict(s.parameters))) + len(s.description) for s in request.tools)
        size = lambda messages: sum(map(_chars, messages))
        tokens_in = (tools + size(request.messages)) // CHARS_PER_TOKEN
        cached = (tools + size(request.messages[:last])) // CHARS_PER_TOKEN if last else 0
        out = max(1, _chars(message) // CHARS_PER_TOKEN)
        return Usage(tokens_in, out, cached, self.price.of(tokens_in, cached, out))


@dataclass(frozen=True)
class Task:
    """What a question of a look-up world asks for. start, hops: of a chain, else "" and 0. register: current values."""

    entities: tuple[str, ...]
    columns: tuple[str, ...]
    start: str = ""
    hops: int = 0
    register: bool = False

    @classmethod
    def read(cls, text: str) -> Task:
        columns = re.search(r"exactly the columns (.+?)\.", text)
        names = tuple(columns.group(1).split(", ")) if columns else ()
        chain = re.search(r"Start at (.+?) and follow the chain of oversight .* for (\d+) steps", text)
        if chain:
            return cls((), names, chain.group(1), int(chain.group(2)))
        listed = re.search(r"Look up(?: these institutes in the documents)?: (.+?)\.(?:\s|$)", text)
        entities = tuple(listed.group(1).split("; ")) if listed else ()
        return cls(entities, names, register="current register" in text)

    @property
    def worker_prompt(self) -> str:
        """The system prompt of a sub-agent: all that its assignments have in common, so that these can be short."""
        return ("You look up institutes in documents: search, open what fits, read. Answer with one Markdown table with "
                f"exactly the columns {', '.join(self.columns)}.")  # fmt: skip

    @staticmethod
    def assignment(entities: Sequence[str]) -> str:
        return f"Look up: {'; '.join(entities)}."

    @property
    def attributes(self) -> list[Attribute]:
        return [a for a in ATTRIBUTES if a.name in self.columns]


def _chars(message: Message) -> int:
    return len(message.content) + sum(len(c.name) + len(c.arguments) for c in message.tool_calls)


def _calls(messages: Sequence[Message]) -> Iterator[tuple[ToolCall, str]]:
    """Every tool call of the conversation with its result."""
    results = {m.tool_call_id: m.content for m in messages if m.role == "tool"}
    for message in messages:
        for call in message.tool_calls:
            yield call, results.get(call.id, "")


def _call(messages: Sequence[Message], calls: Sequence[tuple[str, dict[str, Any]]]) -> Message:
    made = sum(len(m.tool_calls) for m in messages)
    made_calls = (
        ToolCall(f"functions.{name}:{made + i}", name, json.dumps(arguments))
        for i, (name, arguments) in enumerate(calls)
    )
    return Message("assistant", tool_calls=tuple(made_calls))


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# -- an agent that works itself -----------------------------------------------------------------------------------


def _work(task: Task, messages: Sequence[Message], calls_per_turn: int, can_act: bool) -> Message:
    """Search and open until every value is known or nothing is left to open, then write the table."""
    seen = list(_calls(messages))
    chain: list[str] = []
    wanted: list[tuple[str, dict[str, Any]]] = []
    if can_act and task.register:
        wanted = _register_step(seen)
    elif not task.register:
        chain = _chain(task, seen) if task.start else list(task.entities)
        if can_act:
            steps = (_next_step(entity, task, seen) for entity in chain)
            wanted = list(itertools.islice((step for step in steps if step is not None), calls_per_turn))
    if wanted:
        return _call(messages, wanted)
    rows = _register_rows(seen, task) if task.register else [_row(entity, task, seen) for entity in chain]
    return Message("assistant", render_table(rows, task.columns))


def _text_about(entity: str, seen: Sequence[tuple[ToolCall, str]]) -> str:
    return "\n".join(result for call, result in seen if call.name == "open" and entity in result)


def _row(entity: str, task: Task, seen: Sequence[tuple[ToolCall, str]]) -> dict[str, str]:
    text = _text_about(entity, seen)
    return {task.columns[0]: entity, **{a.name: a.read(text, entity) or UNKNOWN for a in task.attributes}}


def _next_step(entity: str, task: Task, seen: Sequence[tuple[ToolCall, str]]) -> tuple[str, dict[str, Any]] | None:
    """The next call that may complete ``entity``'s row, or None when it is complete or nothing is left to try."""
    text = _text_about(entity, seen)
    known = all(a.read(text, entity) for a in task.attributes)
    if known and not (task.start and OVERSEER.read(text, entity) is None):
        return None
    hits = [result for call, result in seen if call.name == "search" and _arguments(call).get("query") == entity]
    if not hits:
        return "search", {"query": entity, "limit": 8}
    opened = {(a.get("document"), a.get("offset", 0)) for a in (_arguments(c) for c, _ in seen if c.name == "open")}
    for name in re.findall(rf"^\[([^\]]+)\] {re.escape(entity)} \(", "\n".join(hits), re.M):
        if (name, 0) not in opened:
            return "open", {"document": name}
    return None


def _chain(task: Task, seen: Sequence[tuple[ToolCall, str]]) -> list[str]:
    """The institutes of the chain that are known so far."""
    chain = [task.start]
    while len(chain) <= task.hops:
        follower = OVERSEER.read(_text_about(chain[-1], seen), chain[-1])
        if follower is None:
            break
        chain.append(follower)
    return chain


def _register_step(seen: Sequence[tuple[ToolCall, str]]) -> list[tuple[str, dict[str, Any]]]:
    if not any(call.name == "search" for call, _ in seen):
        return [("search", {"query": "current register", "limit": 3})]
    opened = [(call, result) for call, result in seen if call.name == "open"]
    found = re.search(r"^\[([^\]]+)\] Current register", "\n".join(r for c, r in seen if c.name == "search"), re.M)
    if found is None:
        return []
    if not opened:
        return [("open", {"document": found.group(1)})]
    more = re.search(r"open with offset=(\d+)\]", opened[-1][1])
    return [("open", {"document": found.group(1), "offset": int(more.group(1))})] if more else []


def _register_rows(seen: Sequence[tuple[ToolCall, str]], task: Task) -> list[dict[str, str]]:
    pages = [re.sub(r"\n\[\d+ more characters.*", "", r) for call, r in seen if call.name == "open"]
    rows = {row.get(task.columns[0], ""): row for row in parse_table("".join(pages)) or []}
    return [rows.get(e, {task.columns[0]: e, **{c: UNKNOWN for c in task.columns[1:]}}) for e in task.entities]


# -- an agent that delegates --------------------------------------------------------------------------------------


def _orchestrate(task: Task, request: ModelRequest, scripted: Scripted, can_assign: bool) -> Message:
    """Create a worker, assign what is missing in the way ``scripted.style`` says, merge the tables that came back."""
    seen = list(_calls(request.messages))
    assigned = [(str(_arguments(c).get("prompt", "")), result) for c, result in seen if c.name == "assign_task"]
    rows: dict[str, dict[str, str]] = {}
    for _, result in assigned:
        for row in parse_table(result) or []:
            known = rows.get(row.get(task.columns[0], ""))
            if known is None or UNKNOWN in known.values():
                rows[row.get(task.columns[0], "")] = row
    prompts = _prompts(task, scripted, rows, _turns(request.messages))
    if prompts and can_assign:
        create = [] if assigned else [("create_subagent", {"name": "reader", "system_prompt": task.worker_prompt})]
        return _call(request.messages, [*create, *(("assign_task", {"agent": "reader", "prompt": p}) for p in prompts)])
    wanted = list(task.entities) or _merged_chain(task, assigned) or list(rows)
    found = [{c: rows[e].get(c, UNKNOWN) for c in task.columns} for e in wanted if e in rows]
    return Message("assistant", render_table(found, task.columns))


def _turns(messages: Sequence[Message]) -> list[list[str]]:
    """The prompts that each turn assigned."""
    turns = ([_arguments(c).get("prompt", "") for c in m.tool_calls if c.name == "assign_task"] for m in messages)
    return [prompts for prompts in turns if prompts]


def _prompts(task: Task, scripted: Scripted, rows: dict[str, dict[str, str]], turns: list[list[str]]) -> list[str]:
    """The assignments of the next turn. An item without a row is assigned in at most two turns."""
    if task.start:
        return _chain_prompts(task, scripted, rows, turns)
    tries = Counter(entity for prompts in turns for entity in {e for p in prompts for e in Task.read(p).entities})
    missing = [e for e in task.entities if e not in rows and tries[e] < 2]
    if scripted.style == "serial":
        missing = missing[: scripted.chunk]
    chunks = [missing[i : i + scripted.chunk] for i in range(0, len(missing), scripted.chunk)]
    copies = scripted.copies if scripted.style == "duplicate" and not turns else 1
    return [task.assignment(chunk) for chunk in chunks for _ in range(copies)]


def _chain_prompts(
    task: Task, scripted: Scripted, rows: dict[str, dict[str, str]], turns: list[list[str]]
) -> list[str]:
    """``serial`` hands out one hop at a time, each needing the one before; other styles the whole chain at once."""
    chain = list(rows)
    if scripted.style == "serial":
        if len(chain) > task.hops or len(turns) > task.hops:
            return []
        start = chain[-1] if chain else task.start
        return [f"Start at {start} and follow the chain of oversight (once) for 1 steps."]
    if turns:
        return []
    whole = f"Start at {task.start} and follow the chain of oversight (to its end) for {task.hops} steps."
    return [whole] * (scripted.copies if scripted.style == "duplicate" else 1)


def _merged_chain(task: Task, assigned: Sequence[tuple[str, str]]) -> list[str]:
    chain: list[str] = []
    for _, result in assigned:
        for row in parse_table(result) or []:
            name = row.get(task.columns[0], "")
            if name and name not in chain:
                chain.append(name)
    return chain[: task.hops + 1]
