"""What a person sees while a swarm runs: a reader of its events, drawn as a live tree or as plain lines."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from . import clock

MARKS = {"completed": ("✓", "green"), "failed": ("✗", "red"), "timed_out": ("⌛", "yellow"), "limit": ("▲", "yellow"),
         "cancelled": ("■", "magenta"), "not_started": ("·", "magenta")}  # fmt: skip
LINE_SECONDS = 2.0
SILENCE_SECONDS = 10.0
SHOWN = 12


@dataclass(slots=True)
class _Task:
    agent: str
    prompt: str
    state: str = "queued"
    doing: str = ""
    tokens: int = 0
    steps: int = 0
    since: float = 0.0


@dataclass
class LiveState:
    """Folds events into what is going on now; finished tasks leave only their counts and a short tail."""

    main: str = "thinking"
    mode: str = "swarm"
    turn: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    critical: int = 0
    longest: int = 0  # steps of the longest sub-agent of the stage under way
    started: float = 0.0
    now: float = 0.0
    peak: int = 0
    tasks: dict[str, _Task] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=4))
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=3))

    def take(self, event: dict[str, Any]) -> str | None:
        """Take in one event; returns a sentence when it is worth a line of its own."""
        data, kind = event["data"], event["kind"]
        self.now = event["time"]
        if kind in ("swarm.start", "swarm.resume"):
            self.started = self.now
            self.mode = data.get("mode", self.mode)
            return "resumed: what was paid for is replayed from the log" if kind == "swarm.resume" else None
        if kind == "task.assign":
            self.tasks[data["task"]] = _Task(data["agent"], " ".join(data["prompt"].split())[:60])
        elif kind == "task.start":
            task = self.tasks.setdefault(data["task"], _Task(data["agent"], ""))
            task.state, task.since = "running", self.now
            self.peak = max(self.peak, self.running)
        elif kind == "task.end":
            return self._ended(data)
        elif kind == "model.reply":
            self._reply(data)
        elif kind in ("model.call", "tool.call"):
            self._doing(data, "thinking" if kind == "model.call" else data["name"])
        elif kind == "stage" and data["agent"] == "main":
            self.critical += data["critical_steps"]
            self.longest = 0
        elif kind == "limit" and data["scope"] in ("run", "main"):
            return self._note(f"limit: {data['message']}")
        elif kind == "warning":
            return self._note(f"warning: {data['message']}")
        elif kind == "limiter":
            return self._limiter(data)
        return None

    @property
    def critical_so_far(self) -> int:
        """Critical steps of the finished stages and of the one under way."""
        return self.critical + (1 + self.longest if self.longest else 0)

    @property
    def running(self) -> int:
        return sum(task.state == "running" for task in list(self.tasks.values()))

    def _ended(self, data: dict[str, Any]) -> str | None:
        self.tasks.pop(data["task"], None)
        outcome = data["outcome"]
        self.ended[outcome] += 1
        text = f"{MARKS[outcome][0]} {data['task']} {data['agent']}: {outcome}" + (
            f" ({data['reason']})" if data["reason"] else f", {data['steps']} steps, {data['seconds']:.1f} s"
        )
        self.tail.append(text)
        return text if outcome != "completed" else None

    def _reply(self, data: dict[str, Any]) -> None:
        self.tokens_in += data["tokens_in"]
        self.tokens_out += data["tokens_out"]
        self.cost += data["cost"]
        task = self.tasks.get(data["agent"])
        if task is not None:
            task.tokens += data["tokens_in"] + data["tokens_out"]
        elif data["agent"] == "main":
            self.turn = data["step"]

    def _doing(self, data: dict[str, Any], what: str) -> None:
        task = self.tasks.get(data["agent"])
        if task is not None:
            task.doing, task.steps = what, data["step"]
            if "/" not in data["agent"]:
                self.longest = max(self.longest, task.steps)
        elif data["agent"] == "main":
            self.main = "waiting for sub-agents" if what == "assign_task" else what

    def _limiter(self, data: dict[str, Any]) -> str:
        pause = f", pausing {data['seconds']:.1f} s" if data.get("seconds") else ""
        what = f"{data['event']}, {data['capacity']} calls at a time{pause}"
        return self._note(f"{data['endpoint']}: {what} ({data['reason']})")

    def _note(self, text: str) -> str:
        self.notes.append(text)
        return text

    def summary(self) -> str:
        """One line: where the run is."""
        queued = len(self.tasks) - self.running
        parts = [f"{self.now - self.started:6.1f} s", f"turn {self.turn}"]
        if self.mode == "swarm":
            parts.append(f"{self.running} running, {queued} queued, {self.ended.total()} ended")
            bad = ", ".join(f"{n} {name}" for name, n in self.ended.items() if name != "completed")
            parts += [bad] if bad else []
        parts += [f"{self.tokens_in:,} + {self.tokens_out:,} tokens", f"critical steps {self.critical_so_far}"]
        parts += [f"cost {self.cost:.4f}"] if self.cost else []
        return " · ".join(parts)

    def tree(self) -> RenderableType:
        """The tree of agents at work, the last that ended, and the notes. Drawn from another thread than the run's,
        hence the copies."""
        root = Tree(Text(f"orchestrator: {self.main}", style="bold"))
        running = [(id, task) for id, task in list(self.tasks.items()) if task.state == "running"]
        for id, task in running[:SHOWN]:
            line = Text(f"{id} {task.agent} ", style="cyan")
            line.append(
                f"step {max(1, task.steps)} {task.doing} · {task.tokens:,} tokens · {self.now - task.since:.0f} s "
            )
            line.append(task.prompt, style="dim")
            root.add(line)
        if len(running) > SHOWN:
            root.add(Text(f"… {len(running) - SHOWN} more running", style="dim"))
        tail = [Text(text, style=_style(text), overflow="ellipsis", no_wrap=True) for text in list(self.tail)]
        notes = [Text(text, style="bold yellow") for text in list(self.notes)]
        return Group(root, *tail, *notes, Text(self.summary()))


def _style(text: str) -> str:
    return next((style for mark, style in MARKS.values() if text.startswith(mark)), "")


class LiveView:
    """Follows a run on ``stream``: a live tree on a terminal, elsewhere a plain line every two seconds.

    Use as a context manager, pass ``view.take`` as a listener, and run :meth:`heartbeat` beside it, so that time is
    seen to pass while a model takes minutes. virtual: the run's clock is not the wall's.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False, virtual: bool = False):
        self.stream = stream or sys.stderr
        self.state = LiveState()
        self.quiet, self.virtual = quiet, virtual
        console = Console(file=self.stream)
        tty = console.is_terminal and not quiet
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4) if tty else None
        self._last = time.monotonic()

    def _draw(self) -> RenderableType:
        self._look_at_the_clock()
        return self.state.tree()

    def _look_at_the_clock(self) -> None:
        if not self.virtual and self.state.started:
            self.state.now = max(self.state.now, clock.timestamp())

    async def heartbeat(self) -> None:
        """Off a terminal: a line whenever nothing has been said for a while. Ends when cancelled."""
        while not (self.quiet or self.virtual or self._live is not None):
            await asyncio.sleep(LINE_SECONDS)
            if time.monotonic() - self._last >= SILENCE_SECONDS:
                self._look_at_the_clock()
                self.line(self.state.summary())

    def take(self, event: dict[str, Any]) -> None:
        line = self.state.take(event)
        if self.quiet or self._live is not None:
            return
        if line is not None:
            self.line(line)
        elif time.monotonic() - self._last >= LINE_SECONDS:
            self.line(self.state.summary())

    def line(self, text: str) -> None:
        """Print one line now, above the live tree if there is one."""
        self._last = time.monotonic()
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
