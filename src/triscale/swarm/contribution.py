"""Which sub-agent was worth it: marginal contributions, redundant agents, spawn efficiency.

Two ways, and every result says which one it is:

``leave_one_out``: where the answer can be scored. The orchestrator's last model call is made again with recorded
results, once as it was and once for each assignment with that result taken out; the difference in score is the
assignment's marginal contribution. Assignments whose results can be taken out *together* without a lower score are
redundant (taken out from the last one backwards, so of two equal ones only the later is).

``overlap``: otherwise. A result's distinctive words (numbers, names, words of four letters or more, none of them from
the question or the prompts) and the documents it rests on; what no earlier result has is new. Below
``REDUNDANT_BELOW`` new, an assignment counts as redundant. This is a proxy: it knows nothing about being right.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .ledger import MAIN, Ledger
from .types import Message, ModelClient, ModelReply, ModelRequest, ToolCall, Usage

REDUNDANT_BELOW = 0.1
LEFT_OUT = "[no result]"
PARALLEL_REPLAYS = 16


@dataclass(frozen=True)
class Contribution:
    """One completed assignment. marginal: loss of score without it (leave_one_out), or the share of its content that is
    new (overlap). used: share of its distinctive words that the final answer contains."""

    task: str
    agent: str
    marginal: float
    used: float
    redundant: bool
    tokens: int
    cost: float


@dataclass(frozen=True)
class Contributions:
    """method: how it was found. redundant_rate: redundant / completed. spawn_efficiency: completed assignments that
    contributed / all assigned. score: of the whole answer. cost_per_quality: cost / score (None without either).
    replays, replay_usage: model calls made for this measurement, not part of the run's cost."""

    method: Literal["leave_one_out", "overlap"]
    items: tuple[Contribution, ...]
    redundant_rate: float
    spawn_efficiency: float
    score: float | None = None
    metric: str | None = None
    cost_per_quality: float | None = None
    tokens_per_quality: float | None = None
    replays: int = 0
    replay_usage: Usage = field(default_factory=Usage)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def by_overlap(ledger: Ledger, *, score: float | None = None, metric: str | None = None) -> Contributions:
    """Contributions by what each result says that earlier ones do not. score: of the final answer, if known."""
    run, tasks = ledger.run, ledger.tasks()
    given = _words(run["task"] or "").union(*(_words(t["prompt"] or "") for t in tasks))
    answer = _words(run["text"] or "")
    known: set[str] = set()
    marginal, redundant = {}, set()
    for task in _completed(tasks):
        words = _words(task["result"] or "") - given
        content = words | {f"document {name}" for name in _evidence(ledger, task["id"])}
        new = len(content - known) / len(content) if content else 0.0
        marginal[task["id"]] = new
        if new < REDUNDANT_BELOW:
            redundant.add(task["id"])
        known |= content
    used = {t["id"]: _share(_words(t["result"] or "") - given, answer) for t in _completed(tasks)}
    return _collect(ledger, "overlap", marginal, used, redundant, score, metric)


async def leave_one_out(
    ledger: Ledger, client: ModelClient, score: Callable[[str], Mapping[str, float]], *, metric: str = "item_f1",
    progress: Callable[[int, int], None] | None = None,
) -> Contributions:  # fmt: skip
    """Contributions by replaying the final step of ``main`` with ``client``, which should be deterministic.

    score: answer -> numbers by name, of which ``metric`` is used. Takes at most twice as many model calls as there are
    completed assignments, plus one. The replayed model has no tools, so it must answer. progress: called with (replays
    made, completed assignments) after each.
    """
    conversation, request = _final_request(ledger)
    tasks = _completed(ledger.tasks())
    tell = (lambda made: progress(made, len(tasks))) if progress else None
    replayer = _Replayer(client, request, conversation, score, metric, tell)
    whole = await replayer.without(())
    ids = [t["id"] for t in tasks if t["owner"] == MAIN]
    scores = await asyncio.gather(*(replayer.without((id,)) for id in ids))
    marginal = {id: whole - value for id, value in zip(ids, scores, strict=True)}
    redundant: set[str] = set()
    for id in reversed(ids):  # jointly: of two equal results one is needed
        if marginal[id] <= 1e-12 and await replayer.without((*redundant, id)) >= whole - 1e-12:
            redundant.add(id)
    run = ledger.run
    given = _words(run["task"] or "")
    answer = _words(run["text"] or "")
    used = {t["id"]: _share(_words(t["result"] or "") - given, answer) for t in tasks}
    return _collect(ledger, "leave_one_out", marginal, used, redundant, whole, metric, replayer)


class _Replayer:
    """Makes the final call with some results left out and scores the answer."""

    def __init__(
        self, client: ModelClient, request: ModelRequest, conversation: list[dict[str, Any]],
        score: Callable[[str], Mapping[str, float]], metric: str, tell: Callable[[int], None] | None,
    ):  # fmt: skip
        self.client, self.request, self.conversation = client, request, conversation
        self.score, self.metric, self.tell = score, metric, tell
        self.calls, self.usage = 0, Usage()
        self._gate = asyncio.Semaphore(PARALLEL_REPLAYS)
        self._known: dict[frozenset[str], float] = {}

    async def without(self, left_out: Collection[str]) -> float:
        key = frozenset(left_out)
        if key not in self._known:
            messages = [_message(m, key) for m in self.conversation]
            async with self._gate:
                reply: ModelReply = await self.client.complete(
                    ModelRequest(messages, (), agent=MAIN, step=self.request.step, temperature=0.0)
                )
            self.calls += 1
            self.usage = self.usage + reply.usage
            self._known[key] = self.score(reply.content)[self.metric]
            if self.tell is not None:
                self.tell(self.calls)
        return self._known[key]


def _final_request(ledger: Ledger) -> tuple[list[dict[str, Any]], ModelRequest]:
    """The conversation before ``main``'s last completed reply."""
    conversation = ledger.conversation(MAIN)
    last = max((i for i, m in enumerate(conversation) if m["role"] == "assistant"), default=len(conversation))
    step = sum(m["role"] == "assistant" for m in conversation)
    return conversation[:last], ModelRequest((), step=max(1, step))


def _message(recorded: Mapping[str, Any], left_out: Collection[str]) -> Message:
    content = LEFT_OUT if recorded.get("task") in left_out else recorded["content"]
    calls = tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in recorded.get("tool_calls") or ())
    return Message(recorded["role"], content, calls, recorded.get("tool_call_id"), reasoning=recorded.get("reasoning"))


def _completed(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [t for t in tasks if t["outcome"] == "completed"]


def _words(text: str) -> set[str]:
    return {
        w.casefold()
        for w in re.findall(r"\w+(?:[.,:/-]\w+)*", text)
        if len(w) >= 4 or w[:1].isdigit() or w[:1].isupper()
    }


def _share(words: set[str], answer: set[str]) -> float:
    return len(words & answer) / len(words) if words else 0.0


def _evidence(ledger: Ledger, agent: str) -> set[str]:
    """Documents the agent opened (a search alone is no evidence)."""
    rows = ledger.rows("SELECT evidence FROM tool_call WHERE agent = ? AND name != 'search'", (agent,))
    return {name for row in rows for name in json.loads(row["evidence"] or "[]")}


def _collect(
    ledger: Ledger, method: Literal["leave_one_out", "overlap"], marginal: Mapping[str, float],
    used: Mapping[str, float], redundant: Collection[str], score: float | None, metric: str | None,
    replayer: _Replayer | None = None,
) -> Contributions:  # fmt: skip
    tasks = ledger.tasks()
    costs = {row["agent"]: row for row in ledger.rows("SELECT * FROM agent_cost")}
    items = []
    for task in _completed(tasks):
        own = costs.get(task["id"])
        if task["id"] in marginal:
            items.append(Contribution(
                task["id"], task["agent"], marginal[task["id"]], used.get(task["id"], 0.0), task["id"] in redundant,
                (own["tokens_in"] + own["tokens_out"]) if own else 0, own["cost"] if own else 0.0,
            ))  # fmt: skip
    wasted = sum(item.redundant for item in items)
    totals = ledger.totals()
    tokens = totals["tokens_in"] + totals["tokens_out"]
    return Contributions(
        method=method, items=tuple(items), redundant_rate=wasted / len(items) if items else 0.0,
        spawn_efficiency=(len(items) - wasted) / len(tasks) if tasks else 1.0, score=score, metric=metric,
        cost_per_quality=totals["cost"] / score if score and totals["cost"] else None,
        tokens_per_quality=tokens / score if score else None,
        replays=replayer.calls if replayer else 0, replay_usage=replayer.usage if replayer else Usage(),
    )  # fmt: skip
