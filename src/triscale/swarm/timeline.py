"""The timeline of a run as an SVG picture: one row an agent, bars for model and tool calls, concurrency below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from .ledger import MAIN, Ledger
from .metrics import Paths

WIDTH, LABEL, RIGHT, TOP = 1100, 150, 16, 30
MOST_ROWS = 301
CHART = 64


def timeline_svg(ledger: Ledger) -> str:
    """The picture as an SVG element that takes its colours from the page's CSS classes."""
    run = ledger.run
    begin, length = run["started"], max(run["active"] or 0.0, 1e-9)
    tasks = ledger.rows(
        "SELECT * FROM task WHERE active_start IS NOT NULL ORDER BY id != 'main', assigned, turn, place"
    )
    shown, left_out = _rows(ledger, tasks)
    row = 18 if len(shown) <= 40 else 9 if len(shown) <= 120 else 4
    scale = (WIDTH - LABEL - RIGHT) / length
    x = lambda time: LABEL + (time - begin) * scale
    bottom = TOP + row * len(shown)
    height = bottom + 14 + (CHART + 22 if len(tasks) > 1 else 0)
    chain = Paths(ledger).critical_chain()
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline of agents" class="timeline">']
    parts += _axis(length, x, begin, bottom)
    calls = _calls(ledger)
    for number, task in enumerate(shown):
        parts += _row(task, calls[task["id"]], x, TOP + number * row, row, task["id"] in chain)
    if left_out:
        parts.append(
            f'<text x="{LABEL}" y="{bottom + 11}" class="tick">{left_out} more sub-agents are not drawn</text>'
        )
    if len(tasks) > 1:
        parts += _concurrency(tasks, x, begin, length, bottom + 22)
    return "".join([*parts, "</svg>"])


def _rows(ledger: Ledger, tasks: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """At most ``MOST_ROWS`` agents: those on the critical path, the failed ones, and others evenly over the run."""
    if len(tasks) <= MOST_ROWS:
        return list(tasks), 0
    chain = Paths(ledger).critical_chain()
    first = [t for t in tasks if t["id"] == MAIN or t["id"] in chain or t["outcome"] != "completed"][:MOST_ROWS]
    keep = {t["id"] for t in first}
    others, room = [t for t in tasks if t["id"] not in keep], MOST_ROWS - len(keep)
    keep.update(others[i * len(others) // room]["id"] for i in range(room))
    return [t for t in tasks if t["id"] in keep], len(tasks) - len(keep)


def _calls(ledger: Ledger) -> dict[str, list[tuple[str, float, float, str]]]:
    """agent -> (class, start, end, tooltip) of every call that ended."""
    found: dict[str, list[tuple[str, float, float, str]]] = defaultdict(list)
    for c in ledger.rows("SELECT * FROM model_call WHERE active_end IS NOT NULL"):
        tip = f"{c['id']} model {c['seconds']:.2f} s, {c['tokens_in']} in, {c['tokens_out']} out"
        failed = "" if c["outcome"] == "completed" else f", {c['outcome']}"
        found[c["agent"]].append(
            ("bad" if failed else "model", c["active_end"] - c["seconds"], c["active_end"], tip + failed)
        )
    for t in ledger.rows(
        "SELECT * FROM tool_call WHERE active_end IS NOT NULL AND task IS NULL AND name != 'create_subagent'"
    ):
        failed = t["outcome"] != "completed"
        tip = f"{t['id']} {t['name']} {t['seconds']:.2f} s {t['arguments'] or ''}"[:200]
        found[t["agent"]].append(("bad" if failed else "tool", t["active_start"], t["active_end"], tip))
    return found


def _row(
    task: dict[str, Any], calls: Sequence[tuple[str, float, float, str]], x: Any, y: float, row: int, critical: bool
) -> list[str]:
    gap = 1 if row < 9 else 2
    h = row - gap
    start, end = task["active_start"], task["active_end"]
    state = task["outcome"] or "running"
    tip = f"{task['id']} {task['agent']}: {state}, {end - start:.2f} s, {task['steps']} steps"
    parts = []
    if row >= 9:
        size = 11 if row > 10 else 8
        name = "orchestrator" if task["id"] == MAIN else f"{task['id']} {task['agent']}"
        name = name if len(name) <= 24 else name[:23] + "…"
        weight = " critical" if critical or task["id"] == MAIN else ""
        parts.append(f'<text x="{LABEL - 8}" y="{y + row / 2 + size / 3:.1f}" class="label{weight}" '
                     f'font-size="{size}">{escape(name)}</text>')  # fmt: skip
    width = max(x(end) - x(start), 1.0)
    kind = "waiting" + (" critical" if critical else "") + ("" if state in ("completed", "running") else " failed")
    parts.append(f'<rect x="{x(start):.2f}" y="{y:.1f}" width="{width:.2f}" height="{h}" class="{kind}">'
                 f"<title>{escape(tip)}</title></rect>")  # fmt: skip
    for name, a, b, text in calls:
        parts.append(f'<rect x="{x(a):.2f}" y="{y:.1f}" width="{max(x(b) - x(a), 0.6):.2f}" height="{h}" '
                     f'class="{name}"><title>{escape(text)}</title></rect>')  # fmt: skip
    if critical and row >= 9:
        parts.append(f'<rect x="{x(start):.2f}" y="{y:.1f}" width="{width:.2f}" height="{h}" class="outline"/>')
    return parts


def ticks(length: float, most: int = 8) -> list[float]:
    """Round numbers from 0 to ``length``, at most ``most`` steps apart."""
    step = 10.0**-6
    while length / step > most:
        for factor in (2.0, 2.5, 2.0):  # 1, 2, 5, 10
            step *= factor
            if length / step <= most:
                break
    return [i * step for i in range(int(length / step + 1e-9) + 1)]


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min" + (f" {round(seconds % 60)} s" if round(seconds % 60) else "")
    return f"{int(seconds // 3600)} h" + (f" {int(seconds % 3600 // 60)} min" if seconds % 3600 >= 60 else "")


def _axis(length: float, x: Any, begin: float, bottom: float) -> list[str]:
    parts = []
    for tick in ticks(length):
        at = x(begin + tick)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{bottom}" class="grid"/>'
                     f'<text x="{at:.1f}" y="{TOP - 12}" class="tick middle">{duration(tick)}</text>')  # fmt: skip
    return parts


def _concurrency(tasks: Sequence[dict[str, Any]], x: Any, begin: float, length: float, top: float) -> list[str]:
    """Sub-agents at work over time, as a filled step curve."""
    edges: dict[float, int] = defaultdict(int)
    for task in tasks:
        if task["id"] != MAIN:
            edges[task["active_start"]] += 1
            edges[task["active_end"]] -= 1
    level, peak = 0, 0
    steps: list[tuple[float, int]] = []
    for time in sorted(edges):
        level += edges[time]
        peak = max(peak, level)
        if steps and (time - steps[-1][0]) * 1000 < length:  # a slot that is free for an instant is not drawn
            time = steps.pop()[0]
        steps.append((time, level))
    y = lambda n: top + CHART - CHART * n / max(peak, 1)
    path, last = [f"M{x(begin):.1f},{y(0):.1f}"], 0
    for time, count in steps:
        path.append(f"L{x(time):.1f},{y(last):.1f}L{x(time):.1f},{y(count):.1f}")
        last = count
    path.append(f"L{x(begin + length):.1f},{y(last):.1f}L{x(begin + length):.1f},{y(0):.1f}Z")
    middle = top + CHART / 2
    return [f'<path d="{"".join(path)}" class="area"/>',
            f'<line x1="{LABEL}" y1="{y(0):.1f}" x2="{WIDTH - RIGHT}" y2="{y(0):.1f}" class="grid"/>',
            f'<text x="{LABEL - 8}" y="{top + 9}" class="label" font-size="11">{peak}</text>',
            f'<text x="{LABEL - 8}" y="{middle:.1f}" class="label" font-size="11">sub-agents at work</text>',
            f'<text x="{LABEL - 8}" y="{top + CHART:.1f}" class="label" font-size="11">0</text>']  # fmt: skip
