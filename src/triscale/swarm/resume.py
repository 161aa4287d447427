"""What an earlier session of a run recorded, so that a resumed run pays for nothing twice.

A resumed run executes again from the beginning; every model call, tool call and assignment that the log already holds
is answered from the log. Only the turn at which the run stopped is reopened: its completed assignments are kept, and
the others continue from their own recorded calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from triscale.events import Event

from .types import Message, ModelReply, Outcome, ToolCall, Usage


@dataclass
class Recorded:
    """replies: completed model calls by id. results: ``tool.result`` data by call id. assigned, ends: data of
    ``task.assign`` and of the last ``task.end`` by task. attempts: ``task.start`` events by task. spent: everything
    paid for so far. seconds: wall time of the earlier sessions. sessions: how many there were. start, final: data of
    ``swarm.start`` and of the last session's ``result``."""

    replies: dict[str, ModelReply] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    assigned: dict[str, dict[str, Any]] = field(default_factory=dict)
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    created: set[str] = field(default_factory=set)
    staged: set[tuple[str, int]] = field(default_factory=set)
    attempts: Counter[str] = field(default_factory=Counter)
    spent: Usage = Usage()
    seconds: float = 0.0
    sessions: int = 0
    start: dict[str, Any] | None = None
    final: dict[str, Any] | None = None

    @classmethod
    def load(cls, events: Iterable[Event]) -> Recorded:
        self = cls()
        first = last = None
        for event in events:
            if event.kind in ("swarm.start", "swarm.resume"):
                self.sessions += 1
                if first is not None and last is not None:
                    self.seconds += last - first
                first = event.time
                self.final = None
            last = event.time
            self._take(event.kind, event.data)
        if first is not None and last is not None:
            self.seconds += last - first
        self._drop_dead_ends()
        return self

    def _drop_dead_ends(self) -> None:
        """A last reply that was cut or empty ended its run; answering with it again would end the run again."""
        last: dict[str, int] = {}
        for call in self.replies:
            run, _, step = call.rpartition("#")
            last[run] = max(last.get(run, 0), int(step))
        for run, final in last.items():
            reply = self.replies[f"{run}#{final}"]
            if not reply.tool_calls and (reply.finish_reason == "length" or not reply.content.strip()):
                del self.replies[f"{run}#{final}"]

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "model.reply":
            usage = Usage(data["tokens_in"], data["tokens_out"], data["tokens_cached"], data["cost"])
            self.spent = self.spent + usage
            if data.get("outcome") == Outcome.COMPLETED:
                self.replies[data["call"]] = reply_of(data)
        elif kind == "tool.result":
            self.results[data["call"]] = data
        elif kind == "task.assign":
            self.assigned[data["task"]] = data
        elif kind == "task.start":
            self.attempts[data["task"]] += 1
        elif kind == "task.end":
            self.ends[data["task"]] = data
        elif kind == "agent.create":
            self.created.add(data["call"])
        elif kind == "stage":
            self.staged.add((data["agent"], data["turn"]))
        elif kind == "swarm.start":
            self.start = data
        elif kind == "result":
            self.final = data

    def consumed(self, run: str, turn: int) -> bool:
        """True when the model has already replied to the results of this turn, which therefore must not change."""
        return f"{run}#{turn + 1}" in self.replies

    def result(self, call: str, run: str, turn: int) -> dict[str, Any] | None:
        """The recorded result of a tool call if it stands: completed, or already read by the model."""
        data = self.results.get(call)
        if data is None or not (data["outcome"] == Outcome.COMPLETED or self.consumed(run, turn)):
            return None
        return data


def reply_of(data: dict[str, Any]) -> ModelReply:
    """The reply that a ``model.reply`` event recorded."""
    calls = tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in data.get("tool_calls") or ())
    message = Message("assistant", data.get("content") or "", calls, reasoning=data.get("reasoning"))
    usage = Usage(data["tokens_in"], data["tokens_out"], data["tokens_cached"], data["cost"])
    return ModelReply(message, data.get("finish_reason") or "stop", usage, data.get("model") or "")


def conversation(events: Iterable[Event], agent: str = "main") -> list[Message]:
    """The messages of one agent's run as its model saw them, rebuilt from the log; its last reply is the last one."""
    replies: dict[int, ModelReply] = {}
    results: dict[str, dict[str, Any]] = {}
    notes: dict[int, str] = {}
    head: list[Message] = []
    for event in events:
        data = event.data
        if event.kind == "model.call" and data["agent"] == agent:
            head = [Message(m["role"], m["content"]) for m in data.get("opening", ())] or head
            notes[data["step"]] = data.get("note", "")
        elif event.kind == "model.reply" and data["agent"] == agent and data["outcome"] == Outcome.COMPLETED:
            replies[data["step"]] = reply_of(data)
        elif event.kind == "tool.result" and data["agent"] == agent:
            results[data["call"]] = data
    messages = list(head)
    for step in sorted(replies):
        reply = replies[step]
        messages.append(reply.message)
        for index, call in enumerate(reply.tool_calls):
            result = results.get(f"{agent}#{step}.{index}")
            if result is not None:
                note = notes.get(step + 1, "") if index == len(reply.tool_calls) - 1 else ""
                messages.append(Message("tool", result["content"] + note, tool_call_id=call.id))
        if reply.tool_calls == () and step + 1 in replies:
            messages.append(Message("user", EMPTY_REPLY))
    return messages


EMPTY_REPLY = "Your last message was empty. Call a tool, or write your final answer."
