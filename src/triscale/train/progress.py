"""Live progress: a reader of a run's events. One updating line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_SECONDS = 10.0


def short_number(value: float) -> str:
    """1234567 -> "1.23M"."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def short_time(seconds: float) -> str:
    """95 -> "1m35s"."""
    seconds = int(max(0, seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class QuietConsole(Console):
    """Falls silent when its reader has gone (a closed pipe or terminal): training is worth more than its progress."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """Follows the events of one run after another; use as a context manager and as an event listener."""

    def __init__(self, title: str = "", console: Console | None = None):
        self.title = title
        self.console = console or QuietConsole(file=sys.stderr)
        self.live: Live | None = None
        self.total, self.heldout, self.last_line = 0, None, 0.0
        self.last_step: dict[str, Any] = {}
        self.max_logit: float | None = None
        self.growing = False

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.live = Live(console=self.console, refresh_per_second=4, transient=True)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False)

    def status(self, text: str, *, force: bool = False) -> None:
        """The updating line; off a terminal it is printed every few seconds."""
        if self.live is not None:
            self.live.update(Text(text))
        elif force or time.monotonic() - self.last_line > PLAIN_SECONDS:
            self.last_line = time.monotonic()
            self.console.print(text, highlight=False, soft_wrap=True)

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Progress of data preparation: (stage, bytes done, bytes in all or 0)."""
        share = f" of {short_number(total)}B" if total else ""
        self.status(f"{self.title} {stage}: {short_number(done)}B{share}")

    def __call__(self, event: dict[str, Any]) -> None:
        kind, data = event["kind"], event["data"]
        if kind in ("run.start", "run.resume"):
            self.total, self.heldout = data.get("steps", 0), None
            self.max_logit, self.growing = None, False
            if kind == "run.resume":
                self.note(f"{self.title} resuming after step {data['step']}")
        elif kind == "eval":
            self.heldout = data["loss"]
        elif kind == "warning":
            self.note(f"warning: {data['message']}")
        elif kind == "step":
            self.last_step = data
            self.status(self._step_line(data))
        elif kind == "logits":  # follows the step it belongs to
            self.max_logit = _largest(data["max_logits"])
            self.growing = bool(data.get("warned"))
            if self.last_step:
                self.status(self._step_line(self.last_step))

    def _step_line(self, data: dict[str, Any]) -> str:
        total = self.total or data["step"]
        left = (total - data["step"]) * data["seconds"] / max(data["step"], 1)
        held = f"  held-out {self.heldout:.3f}" if self.heldout is not None else ""
        logit = (
            "" if self.max_logit is None else f"  max logit {self.max_logit:.1f}{' GROWING' if self.growing else ''}"
        )
        return (
            f"{self.title} step {data['step']}/{total}  loss {data['loss']:.3f}{held}  lr {data['lr']:.2e}  "
            f"grad {data['grad_norm']:.2f}{logit}  {short_number(data['tokens_per_s'])} tok/s  mfu {data['mfu']:.0%}  "
            f"{short_time(left)} left"
        )


def _largest(layers: dict[str, list[Any]]) -> float | None:
    """Over layers and heads; heads that were not seen or are broken (strings in the log) do not count."""
    values = [float(value) for heads in layers.values() for value in heads]
    return max((value for value in values if math.isfinite(value)), default=None)
