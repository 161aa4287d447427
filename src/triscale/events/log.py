"""Append-only event logs: one JSON object a line, one writer a file."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .schema import VERSION, Event, check_event


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: write them as strings so that every reader can parse the line."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class EventWriter:
    """Appends events to ``path``; opening repairs a torn last line left by a crash.

    clock: returns seconds; replace it to write in virtual time. Every listener is called with each event as written
    (a dict), which is how live views follow a run.
    """

    def __init__(self, path: str | Path, run: str, clock: Callable[[], float] = time.time):
        self.path, self.run, self.clock = Path(path), run, clock
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(
        self, kind: str, *, span: str | None = None, parent: str | None = None, durable: bool = False, **data: Any
    ) -> dict[str, Any]:
        """Append one event and return it. ``durable`` waits until it is on disk (fsync): "paid" means fsynced.

        Raises ``OSError`` when the disk is full; the log then ends with the event before.
        """
        check_event(kind, data)
        event = {"v": VERSION, "time": self.clock(), "run": self.run, "span": span, "parent": parent, "kind": kind,
                 "data": data}  # fmt: skip
        try:
            line = json.dumps(event, allow_nan=False, ensure_ascii=False)
        except ValueError:
            line = json.dumps(_finite(event), ensure_ascii=False)
        self._append(line.encode("utf-8", "surrogatepass") + b"\n")
        if durable:
            os.fsync(self._file.fileno())
        for listener in self.listeners:
            listener(event)
        return event

    def _append(self, line: bytes) -> None:
        """The whole line or nothing: a full disk may take a part of it, which would break every later reader."""
        start, left = os.fstat(self._file.fileno()).st_size, memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            self._file.truncate(start)
            raise

    def close(self) -> None:
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        data = path.read_bytes()
        file.truncate(data.rfind(b"\n") + 1)


def read_events(path: str | Path, *, offset: int = 0) -> Iterator[Event]:
    """Events of one file in order. A torn last line is left out; a broken line elsewhere raises ``ValueError``."""
    with open(path, "rb") as file:
        file.seek(offset)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield Event.model_validate_json(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} after byte {offset}: not an event ({error})") from error


def current_events(path: str | Path) -> list[Event]:
    """Events that count: a ``run.start`` voids all before it (nothing of them had been saved), and a ``run.resume`` at
    step s voids earlier ``step``-bearing events after s."""
    kept: list[Event] = []
    for event in read_events(path):
        if event.kind == "run.start":
            kept = []
        elif event.kind == "run.resume":
            step = event.data["step"]
            kept = [e for e in kept if e.kind in ("config", "run.start") or e.data.get("step", -1) <= step]
        kept.append(event)
    return kept
