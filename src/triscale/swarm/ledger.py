"""The spawn ledger: a run's event log as SQLite tables, the tree of agents once and every token once.

    ledger = Ledger.of_run("runs/7")          # reads events.jsonl; Ledger.of_run(path, file="ledger.sqlite") keeps it
    ledger.rows("SELECT agent, sum(cost) FROM model_call GROUP BY agent")

Tables: ``run`` (one row), ``agent`` (kinds of sub-agents that were created), ``task`` (every agent's run: ``main`` and
each assignment), ``model_call``, ``tool_call``, ``stage``, ``note`` (limits, rate limiter, warnings). The view
``agent_cost`` sums the own model calls of each task.

Tokens and cost stand on ``model_call`` alone and every total is a sum over it, so nothing is counted twice. An event
that appears again under the same id (a call lost in a crash and made again) replaces the earlier one; such calls are
counted in ``model_call.lost``, since the provider may have charged for them. ``active`` times leave out the pauses
between sessions of a resumed run.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..events import Event, read_events

_TABLES = """
CREATE TABLE run(
    name TEXT, task TEXT, mode TEXT, counting TEXT, virtual INT, world TEXT, orchestrator TEXT, subagent TEXT,
    limits TEXT, system_prompt TEXT, sessions INT, started REAL, ended REAL, active REAL, outcome TEXT, reason TEXT,
    limit_name TEXT, text TEXT, resume TEXT);
CREATE TABLE agent(
    name TEXT, owner TEXT, system_prompt TEXT, turn INT, created REAL, replaces INT, PRIMARY KEY(owner, name, turn));
CREATE TABLE task(
    id TEXT PRIMARY KEY, agent TEXT, owner TEXT, call TEXT, depth INT, turn INT, place INT, prompt TEXT, assigned REAL,
    started REAL, ended REAL, attempts INT DEFAULT 0, seconds REAL DEFAULT 0, queue_seconds REAL DEFAULT 0,
    steps INT DEFAULT 0, critical_steps INT DEFAULT 0, outcome TEXT, reason TEXT, limit_name TEXT, result TEXT,
    delivered INT, active_start REAL, active_end REAL, slot_seconds REAL DEFAULT 0);
CREATE TABLE model_call(
    id TEXT PRIMARY KEY, agent TEXT, step INT, model TEXT, endpoint TEXT, started REAL, ended REAL, seconds REAL,
    queue_seconds REAL, attempts INT, lost INT DEFAULT 0, outcome TEXT, reason TEXT, tokens_in INT DEFAULT 0,
    tokens_out INT DEFAULT 0, tokens_cached INT DEFAULT 0, cost REAL DEFAULT 0, finish_reason TEXT, content TEXT,
    reasoning TEXT, tool_calls TEXT, opening TEXT, active_start REAL, active_end REAL);
CREATE TABLE tool_call(
    id TEXT PRIMARY KEY, agent TEXT, step INT, place INT, name TEXT, arguments TEXT, tool_call_id TEXT, started REAL,
    ended REAL, seconds REAL, outcome TEXT, reason TEXT, content TEXT, chars INT, truncated INT, evidence TEXT,
    task TEXT, active_start REAL, active_end REAL);
CREATE TABLE stage(
    agent TEXT, turn INT, main_steps INT, sub_steps TEXT, critical_steps INT, PRIMARY KEY(agent, turn));
CREATE TABLE note(time REAL, kind TEXT, text TEXT, data TEXT);
CREATE INDEX task_of ON task(owner, turn);
CREATE INDEX model_call_of ON model_call(agent, step);
CREATE INDEX tool_call_of ON tool_call(agent, step);
CREATE VIEW agent_cost AS SELECT agent, count(*) AS calls, sum(tokens_in) AS tokens_in, sum(tokens_out) AS tokens_out,
    sum(tokens_cached) AS tokens_cached, sum(cost) AS cost, sum(seconds) AS seconds FROM model_call GROUP BY agent;
"""
MAIN = "main"


class Ledger:
    """The tables of one run. Raises :class:`ConfigError` when there is no run in the events."""

    def __init__(self, events: Iterable[Event | Mapping[str, Any]], *, file: str | Path | None = None):
        if file is not None:
            Path(file).unlink(missing_ok=True)  # the event log is the truth; this is an index made anew
        self.database = sqlite3.connect(str(file) if file else ":memory:")
        self.database.row_factory = sqlite3.Row
        self.database.executescript(_TABLES)
        _Filler(self.database).fill(e if isinstance(e, Event) else Event.model_validate(e) for e in events)
        self.database.commit()
        if not self.rows("SELECT 1 FROM run"):
            raise ConfigError("run", "the log holds no swarm.start event", "Give the folder of a swarm run")

    @classmethod
    def of_run(cls, directory: str | Path, *, file: str | Path | None = None) -> Ledger:
        """The ledger of a run's folder (or of its ``events.jsonl``)."""
        path = Path(directory)
        path = path / "events.jsonl" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError("run", f"{str(directory)!r} holds no events.jsonl", "Give the folder of a swarm run")
        return cls(read_events(path), file=file)

    def rows(self, query: str, parameters: Any = ()) -> list[dict[str, Any]]:
        return [dict(row) for row in self.database.execute(query, parameters)]

    def one(self, query: str, parameters: Any = ()) -> dict[str, Any]:
        return self.rows(query, parameters)[0]

    @property
    def run(self) -> dict[str, Any]:
        """The run's row, ``limits`` as a dict."""
        row = self.one("SELECT * FROM run")
        return {**row, "limits": json.loads(row["limits"] or "{}")}

    def tasks(self) -> list[dict[str, Any]]:
        """Every assignment in the order of assignment (without ``main``)."""
        return self.rows("SELECT * FROM task WHERE id != ? ORDER BY assigned, depth, turn, place", (MAIN,))

    def totals(self) -> dict[str, Any]:
        """tokens_in, tokens_out, tokens_cached, cost, model_calls, tool_calls, lost of the whole tree."""
        calls = self.one(
            "SELECT coalesce(sum(tokens_in), 0) AS tokens_in, coalesce(sum(tokens_out), 0) AS tokens_out, "
            "coalesce(sum(tokens_cached), 0) AS tokens_cached, coalesce(sum(cost), 0.0) AS cost, "
            "count(*) AS model_calls, coalesce(sum(lost), 0) AS lost FROM model_call"
        )
        tools = self.one("SELECT count(*) AS n FROM tool_call WHERE name NOT IN ('assign_task', 'create_subagent')")
        return {**calls, "tool_calls": tools["n"]}

    def tree(self) -> dict[str, Any]:
        """``{id, agent, own: {...}, total: {...}, children: [...]}`` from ``main`` down; ``own`` counts only an agent's
        own model calls, ``total`` those of its descendants too. Every task appears once."""
        own = {row["agent"]: row for row in self.rows("SELECT * FROM agent_cost")}
        tasks = [self.one("SELECT * FROM task WHERE id = ?", (MAIN,)), *self.tasks()]
        nodes = {t["id"]: {"id": t["id"], "agent": t["agent"], "outcome": t["outcome"], "steps": t["steps"],
                           "own": _cost(own.get(t["id"])), "children": []} for t in tasks}  # fmt: skip
        for task in tasks:
            if task["id"] != MAIN:
                nodes[task["owner"] if task["owner"] in nodes else MAIN]["children"].append(nodes[task["id"]])
        _sum_up(nodes[MAIN])
        return nodes[MAIN]

    def conversation(self, agent: str = MAIN) -> list[dict[str, Any]]:
        """The messages of one agent as recorded: its opening, then each reply and the tool results it was shown."""
        messages: list[dict[str, Any]] = []
        for call in self.rows("SELECT * FROM model_call WHERE agent = ? ORDER BY step", (agent,)):
            messages += json.loads(call["opening"] or "[]")
            if call["outcome"] != "completed":
                continue
            tool_calls = json.loads(call["tool_calls"] or "[]")
            messages.append({"role": "assistant", "content": call["content"] or "", "reasoning": call["reasoning"],
                             "tool_calls": tool_calls, "call": call["id"]})  # fmt: skip
            for tool in self.rows(
                "SELECT * FROM tool_call WHERE agent = ? AND step = ? ORDER BY place", (agent, call["step"])
            ):
                messages.append({"role": "tool", "content": tool["content"] or "", "tool_call_id": tool["tool_call_id"],
                                 "call": tool["id"], "task": tool["task"]})  # fmt: skip
        return messages

    def close(self) -> None:
        self.database.close()


def _cost(row: Mapping[str, Any] | None) -> dict[str, Any]:
    names = ("calls", "tokens_in", "tokens_out", "tokens_cached", "cost")
    return {name: (row[name] or 0) if row else 0 for name in names}


def _sum_up(node: dict[str, Any]) -> dict[str, Any]:
    total = dict(node["own"])
    for child in node["children"]:
        for name, value in _sum_up(child).items():
            total[name] += value
    node["total"] = total
    return total


class _Filler:
    """Turns events into rows, one method a kind."""

    def __init__(self, database: sqlite3.Connection):
        self.database = database
        self.paused = 0.0  # pauses between sessions so far
        self.last: float | None = None
        self.slots: dict[str, float] = {}  # active time at which a task got its slot

    def fill(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind == "swarm.resume" and self.last is not None:
                self.paused += event.time - self.last  # negative where a virtual clock starts again from 0
                self.slots.clear()
            self.last = event.time
            handler = getattr(self, "on_" + event.kind.replace(".", "_"), None)
            if handler is not None:
                handler(event, event.data)
        self._finish()

    def active(self, event: Event) -> float:
        return event.time - self.paused

    def put(self, table: str, **values: Any) -> None:
        names = ", ".join(values)
        marks = ", ".join("?" * len(values))
        self.database.execute(f"INSERT OR REPLACE INTO {table}({names}) VALUES ({marks})", list(values.values()))

    def set(self, table: str, id: str, **values: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self.database.execute(f"UPDATE {table} SET {names} WHERE id = ?", [*values.values(), id])

    def on_swarm_start(self, event: Event, d: dict[str, Any]) -> None:
        models = d.get("models") or {}
        self.put("run", name=event.run, task=d["task"], mode=d.get("mode", "swarm"), sessions=1, started=event.time,
                 counting=d.get("counting", "turns"), virtual=bool(d.get("virtual")), world=d.get("world"),
                 orchestrator=(models.get("orchestrator") or {}).get("name"), limits=json.dumps(d["limits"]),
                 subagent=(models.get("subagent") or {}).get("name"), system_prompt=d.get("system_prompt"))  # fmt: skip
        self.put("task", id=MAIN, agent=MAIN, depth=0, prompt=d["task"], assigned=event.time, started=event.time,
                 attempts=1, active_start=self.active(event))  # fmt: skip

    def on_swarm_resume(self, event: Event, d: dict[str, Any]) -> None:
        self.database.execute("UPDATE run SET sessions = ?", (d["session"],))

    def on_agent_create(self, event: Event, d: dict[str, Any]) -> None:
        self.put("agent", name=d["name"], owner=d.get("owner", MAIN), system_prompt=d.get("system_prompt"),
                 turn=d.get("turn"), created=event.time, replaces=bool(d.get("replaces")))  # fmt: skip

    def on_task_assign(self, event: Event, d: dict[str, Any]) -> None:
        self.put("task", id=d["task"], agent=d["agent"], owner=d.get("owner", MAIN), call=d.get("call"),
                 depth=d.get("depth", 1), turn=d.get("turn"), place=d.get("index"), prompt=d.get("prompt"),
                 assigned=event.time)  # fmt: skip

    def on_task_start(self, event: Event, d: dict[str, Any]) -> None:
        now = self.active(event)
        self.slots[d["task"]] = now
        self.database.execute(
            "UPDATE task SET started = coalesce(started, ?), active_start = coalesce(active_start, ?), attempts = ? "
            "WHERE id = ?", (event.time, now, d["attempt"], d["task"]))  # fmt: skip

    def on_task_end(self, event: Event, d: dict[str, Any]) -> None:
        now, slot = self.active(event), self.slots.pop(d["task"], None)
        self.set("task", d["task"], ended=event.time, active_end=now, outcome=d["outcome"], reason=d["reason"],
                 limit_name=d.get("limit"), seconds=d.get("seconds", 0.0), queue_seconds=d.get("queue_seconds", 0.0),
                 steps=d.get("steps", 0), critical_steps=d.get("critical_steps", d.get("steps", 0)),
                 result=d.get("result"), delivered=d.get("delivered"))  # fmt: skip
        if slot is not None:
            self.database.execute(
                "UPDATE task SET slot_seconds = slot_seconds + ? WHERE id = ?", (now - slot, d["task"])
            )

    def on_model_call(self, event: Event, d: dict[str, Any]) -> None:
        again = self.database.execute("SELECT lost + 1 FROM model_call WHERE id = ?", (d["call"],)).fetchone()
        opening = d.get("opening")
        self.put("model_call", id=d["call"], agent=d["agent"], step=d.get("step"), model=d.get("model"),
                 endpoint=d.get("endpoint"), started=event.time, lost=again[0] if again else 0,
                 active_start=self.active(event), opening=json.dumps(opening) if opening else None)  # fmt: skip

    def on_model_reply(self, event: Event, d: dict[str, Any]) -> None:
        self.set("model_call", d["call"], ended=event.time, active_end=self.active(event), seconds=d["seconds"],
                 queue_seconds=d.get("queue_seconds", 0.0), attempts=d.get("attempts", 1), reason=d.get("reason"),
                 outcome=d.get("outcome", "completed"), tokens_in=d["tokens_in"], tokens_out=d["tokens_out"],
                 tokens_cached=d["tokens_cached"], cost=d["cost"], finish_reason=d.get("finish_reason"),
                 content=d.get("content"), reasoning=d.get("reasoning"),
                 tool_calls=json.dumps(d.get("tool_calls") or []))  # fmt: skip

    def on_tool_call(self, event: Event, d: dict[str, Any]) -> None:
        self.put("tool_call", id=d["call"], agent=d["agent"], step=d.get("step"), place=d.get("index"), name=d["name"],
                 arguments=d.get("arguments"), tool_call_id=d.get("tool_call_id"), started=event.time,
                 active_start=self.active(event))  # fmt: skip

    def on_tool_result(self, event: Event, d: dict[str, Any]) -> None:
        self.set("tool_call", d["call"], ended=event.time, active_end=self.active(event), seconds=d["seconds"],
                 outcome=d["outcome"], reason=d.get("reason"), content=d.get("content"), chars=d.get("chars"),
                 truncated=bool(d.get("truncated")), task=d.get("task"),
                 evidence=json.dumps(d.get("evidence") or []))  # fmt: skip

    def on_stage(self, event: Event, d: dict[str, Any]) -> None:
        self.put("stage", agent=d["agent"], turn=d["turn"], main_steps=d.get("main_steps", 1),
                 sub_steps=json.dumps(d.get("sub_steps") or []), critical_steps=d["critical_steps"])  # fmt: skip

    def _note(self, event: Event, d: dict[str, Any], text: str) -> None:
        self.put("note", time=event.time, kind=event.kind, text=text, data=json.dumps(d))

    def on_limit(self, event: Event, d: dict[str, Any]) -> None:
        self._note(event, d, str(d.get("message") or f"{d['limit']} = {d['value']} reached"))

    def on_limiter(self, event: Event, d: dict[str, Any]) -> None:
        self._note(event, d, f"{d['endpoint']}: {d['event']} to {d['capacity']} {d.get('reason') or ''}".strip())

    def on_warning(self, event: Event, d: dict[str, Any]) -> None:
        self._note(event, d, d["message"])

    def on_result(self, event: Event, d: dict[str, Any]) -> None:
        self.database.execute(
            "UPDATE run SET outcome = ?, reason = ?, limit_name = ?, text = ?, resume = ?",
            (d["outcome"], d.get("reason"), d.get("limit"), d.get("text"), d.get("resume")),
        )
        self.set("task", MAIN, ended=event.time, active_end=self.active(event), outcome=d["outcome"],
                 reason=d.get("reason"), result=d.get("text"), steps=d.get("steps", 0),
                 critical_steps=d.get("critical_steps", 0))  # fmt: skip

    def _finish(self) -> None:
        """What the end of the log says about what has no end event: a run that is under way or was killed."""
        if self.last is None:
            return
        end = self.last - self.paused
        self.database.execute("UPDATE run SET ended = ?, active = ? - started", (self.last, end))
        self.database.execute(
            "UPDATE task SET active_end = ?, slot_seconds = slot_seconds + ? - active_start "
            "WHERE active_start IS NOT NULL AND active_end IS NULL AND id != ?",
            (end, end, MAIN),
        )
        self.database.execute("UPDATE task SET active_end = coalesce(active_end, ?) WHERE id = ?", (end, MAIN))
        self.database.execute("UPDATE model_call SET lost = lost + 1 WHERE outcome IS NULL")
