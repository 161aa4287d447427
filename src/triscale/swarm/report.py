"""The report of a run: one self-contained HTML page (timeline, findings, costs, agents) and the same as JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..config import require
from .contribution import Contributions, by_overlap
from .findings import Finding, find
from .ledger import MAIN, Ledger
from .metrics import Metrics, measure
from .table_score import parse_table
from .timeline import duration, timeline_svg

SHOWN_CHARS = 4_000
MOST_AGENTS = 400
MOST_NOTES = 200
METHODS = {
    "leave_one_out": "leave-one-out replay: the loss of score when a result is taken out of the final step",
    "overlap": "overlap, a proxy: the share of its words and documents that no earlier result has",
}


class Report:
    """Everything that is said about one run, computed once.

    score: numbers about the answer by name, if it could be scored. contributions: by leave-one-out if somebody made
    the replays, else by overlap.
    """

    def __init__(
        self, ledger: Ledger, *, score: Mapping[str, float] | None = None, contributions: Contributions | None = None
    ):
        self.ledger, self.score = ledger, dict(score) if score else None
        self.metrics: Metrics = measure(ledger)
        self.contributions = contributions
        if contributions is None and ledger.tasks():
            metric = next(iter(self.score), None) if self.score else None
            value = self.score[metric] if self.score and metric else None
            self.contributions = by_overlap(ledger, score=value, metric=metric)
        self.findings: list[Finding] = find(ledger, self.metrics, self.contributions)

    def to_dict(self) -> dict[str, Any]:
        """The whole report as JSON values."""
        tasks = [
            {k: v for k, v in task.items() if k not in ("active_start", "active_end")} for task in self.ledger.tasks()
        ]
        return {
            "run": {k: v for k, v in self.ledger.run.items() if k != "system_prompt"}, "score": self.score,
            "metrics": self.metrics.to_dict(), "totals": self.ledger.totals(),
            "contributions": self.contributions.to_dict() if self.contributions else None,
            "findings": [f.to_dict() for f in self.findings], "tree": self.ledger.tree(), "tasks": tasks,
            "notes": self.ledger.rows("SELECT * FROM note ORDER BY time"),
        }  # fmt: skip

    def html(self) -> str:
        mark = require("markupsafe", "swarm", "the HTML report").Markup
        run, started = self.ledger.run, self.ledger.run["started"]
        notes = self.ledger.rows("SELECT * FROM note ORDER BY time LIMIT ?", (MOST_NOTES,))
        return _template().render(
            run=run, m=self.metrics, tiles=self._tiles(), findings=self.findings, dur=duration,
            timeline=mark(timeline_svg(self.ledger)), tree=mark(_tree_html(self.ledger, self.contributions)),
            costs=self._costs(),
            contributions=self.contributions, method=METHODS[self.contributions.method] if self.contributions else "",
            notes=[{"at": duration(max(0.0, n["time"] - started)), **n} for n in notes],
            table=parse_table(run["text"] or ""),
        )  # fmt: skip

    def write(self, folder: str | Path) -> dict[str, Path]:
        """Write ``report.html`` and ``report.json`` into ``folder``; returns their paths."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        paths = {"html": target / "report.html", "json": target / "report.json"}
        paths["html"].write_text(self.html(), encoding="utf-8")
        paths["json"].write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False), encoding="utf-8")
        return paths

    def summary(self) -> list[tuple[str, str]]:
        """(name, value) lines for a terminal."""
        return [(name, f"{value}  {note}".rstrip()) for name, value, note in self._tiles()]

    def _tiles(self) -> Iterable[tuple[str, str, str]]:
        m, c = self.metrics, self.contributions
        tiles = [(name.replace("_", " "), f"{value:.3f}", "of the answer") for name, value in (self.score or {}).items()
                 if name in ("item_f1", "row_f1")]  # fmt: skip
        tiles += [("time", duration(m.makespan), f"critical path {duration(m.critical_path)}"),
                  ("critical steps", str(m.critical_steps_turns), f"{m.total_steps} steps in all")]  # fmt: skip
        if m.assigned:
            tiles += [
                ("assignments", str(m.assigned), f"{m.finish_rate:.0%} completed"),
                ("run time of one", duration(m.task_seconds_p50), f"95 % within {duration(m.task_seconds_p95)}"),
                ("at work at once", str(m.peak_concurrency), f"{m.mean_concurrency:.1f} on average"),
                ("speed-up", f"{m.speed_up:.1f}x", "against its own calls in a row"),
                ("bound reached", f"{m.bound:.0%}", f"with {m.concurrent} at a time"),
                ("utilisation", f"{m.utilisation:.0%}", "of all agents' time"),
            ]
        tiles.append(("tokens", _big(m.tokens_in + m.tokens_out), f"{_big(m.tokens_cached)} of them cached"))
        if m.cost:
            tiles.append(("cost", _money(m.cost), f"{m.model_calls:,} model calls"))
        if c is not None and m.assigned:
            tiles.append(
                (
                    "redundant",
                    f"{c.redundant_rate:.0%}",
                    "leave-one-out" if c.method == "leave_one_out" else "by overlap (proxy)",
                )
            )
            if c.cost_per_quality is not None:
                tiles.append(("cost per quality", _money(c.cost_per_quality), f"cost / {c.metric}"))
        return tiles

    def _costs(self) -> list[dict[str, Any]]:
        """One row a kind of agent, then the sum."""
        rows = self.ledger.rows(
            "SELECT task.agent AS agent, count(DISTINCT task.id) AS runs, coalesce(sum(c.calls), 0) AS calls, "
            "coalesce(sum(c.tokens_in), 0) AS tokens_in, coalesce(sum(c.tokens_cached), 0) AS tokens_cached, "
            "coalesce(sum(c.tokens_out), 0) AS tokens_out, coalesce(sum(c.cost), 0.0) AS cost FROM task "
            "LEFT JOIN agent_cost AS c ON c.agent = task.id GROUP BY task.agent "
            "ORDER BY task.agent != 'main', cost DESC, tokens_in DESC"
        )
        names = ("runs", "calls", "tokens_in", "tokens_cached", "tokens_out", "cost")
        rows.append({"agent": "all", "sum": True, **{name: sum(row[name] for row in rows) for name in names}})
        whole = rows[-1]
        for row in rows:
            row["agent"] = "orchestrator" if row["agent"] == MAIN else row["agent"]
            row["money"] = _money(row["cost"]) if whole["cost"] else "no prices"
            part, of = (row["cost"], whole["cost"]) if whole["cost"] else (row["tokens_in"], whole["tokens_in"])
            row["share"] = part / of if of else 0.0
        return rows


@functools.cache
def _template() -> Any:
    jinja = require("jinja2", "swarm", "the HTML report")
    source = files("triscale.swarm").joinpath("report.html").read_text(encoding="utf-8")
    return jinja.Environment(autoescape=True, trim_blocks=True).from_string(source)


def _tree_html(ledger: Ledger, contributions: Contributions | None) -> str:
    """The tree of agents as nested details, at most ``MOST_AGENTS`` of them with their texts."""
    tasks = {t["id"]: t for t in ledger.rows("SELECT * FROM task")}
    value_of = {item.task: item for item in contributions.items} if contributions else {}
    budget = [MOST_AGENTS]
    return _node_html(ledger.tree(), tasks, value_of, ledger, budget)


def _node_html(
    node: dict[str, Any], tasks: Mapping[str, Any], value_of: Mapping[str, Any], ledger: Ledger, budget: list[int]
) -> str:
    if budget[0] <= 0:
        return ""
    budget[0] -= 1
    task, main = tasks[node["id"]], node["id"] == MAIN
    state, value = node["outcome"] or "running", value_of.get(node["id"])
    name = "orchestrator" if main else f"{node['id']} {node['agent']}"
    first = " ".join((task["prompt"] or "").split())[:160]
    numbers = [_steps(node["steps"] or 0), f"{_big(node['own']['tokens_in'] + node['own']['tokens_out'])} tokens"]
    if node["children"]:
        numbers.append(f"{_big(node['total']['tokens_in'] + node['total']['tokens_out'])} with sub-agents")
    if node["own"]["cost"]:
        numbers.append(_money(node["own"]["cost"]))
    if value is not None:
        text = f"contributes {value.marginal:.3g}"
        numbers.append(f'<span class="redundant">{text}, redundant</span>' if value.redundant else text)
    body = _transcript(ledger) if main else _texts(task)
    children = "".join(_node_html(child, tasks, value_of, ledger, budget) for child in node["children"])
    if main and budget[0] <= 0:
        children += f'<p class="soft small">only the first {MOST_AGENTS} agents are listed; report.json has all</p>'
    return (
        f"<details{' open' if main else ''}><summary><b>{escape(name)}</b>"
        f'<span class="badge {escape(state)}">{escape(state)}</span><span class="grow soft">{escape(first)}</span>'
        f'<span class="num">{" · ".join(numbers)}</span></summary><div class="inside">{body}{children}</div></details>'
    )


def _texts(task: Mapping[str, Any]) -> str:
    parts = [("task", task["prompt"] or ""), ("result", task["result"] or "(none)")]
    if task["reason"]:
        parts.insert(1, ("reason", task["reason"]))
    return "".join(f'<div class="role">{name}</div><pre>{escape(_cut(text))}</pre>' for name, text in parts)


def _transcript(ledger: Ledger) -> str:
    """The orchestrator's conversation, folded."""
    parts = []
    for message in ledger.conversation(MAIN):
        text = message["content"]
        for call in message.get("tool_calls") or ():
            text += f"\n→ {call['name']}({call['arguments']})"
        parts.append(f'<div class="role">{escape(message["role"])}</div><pre>{escape(_cut(text.strip()))}</pre>')
        if len(parts) >= 120:
            parts.append('<p class="soft small">the rest is in events.jsonl</p>')
            break
    title = '<span class="soft">conversation of the orchestrator</span>'
    return f'<details><summary>{title}</summary><div class="inside">{"".join(parts)}</div></details>'


def _steps(count: int) -> str:
    return f"{count} step" + ("" if count == 1 else "s")


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}\n[{len(text) - SHOWN_CHARS} more characters]"


def _big(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (size if unit != 'k' else 1e3):.3g} {unit}"
    return f"{number:,.0f}"


def _money(amount: float) -> str:
    return "0" if not amount else f"{amount:.2f}" if amount >= 100 else f"{amount:.3g}"
