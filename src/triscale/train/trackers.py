"""Trackers (TensorBoard, W&B, trackio) as readers of a run's event log.

The trainer knows nothing of them: a background thread follows ``events.jsonl`` and passes numbers on, so a slow or
failing service can neither stall nor break a run. How far a tracker has read is kept beside the run; a resumed run
goes on where it was, and steps that were already sent are not sent again.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from triscale.config import ConfigError, require
from triscale.events import Event

# event kind -> the group its numbers are shown under ("train/loss")
GROUPS = {"step": "train", "eval": "eval", "logits": "max_logit", "router": "router", "spike": "spike",
          "update": "rl"}  # fmt: skip


class Tracker(Protocol):
    """What a tracking service must be able to do. ``values`` are finite floats by name, such as ``train/loss``."""

    name: str

    def start(self, run: str, config: dict[str, Any]) -> None: ...
    def log(self, step: int, values: dict[str, float]) -> None: ...
    def finish(self, summary: dict[str, Any]) -> None: ...


class TensorBoardTracker:
    """Writes TensorBoard files to ``RUN/trackers/tensorboard``; nothing leaves the machine."""

    name = "tensorboard"

    def __init__(self, run_dir: Path):
        require("tensorboard", "tensorboard", "--track tensorboard")
        self.folder = run_dir / "trackers" / "tensorboard"

    def start(self, run: str, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder))
        if config:
            self.writer.add_text("config", "```json\n" + json.dumps(config, indent=1) + "\n```")

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, summary: dict[str, Any]) -> None:
        self.writer.close()


class WandbTracker:
    """One W&B run per run folder, resumed under the same id; honours WANDB_MODE=offline and the like."""

    name = "wandb"

    def __init__(self, run_dir: Path):
        self.wandb, self.run_dir = require("wandb", "wandb", "--track wandb"), run_dir

    def start(self, run: str, config: dict[str, Any]) -> None:
        folder = self.run_dir / "trackers"
        folder.mkdir(parents=True, exist_ok=True)
        self.run = self.wandb.init(project="triscale", id=run_id(self.run_dir), name=run, dir=str(folder),
                                   config=config, resume="allow")  # fmt: skip

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def finish(self, summary: dict[str, Any]) -> None:
        self.run.summary.update(summary)
        self.run.finish(exit_code=0 if summary.get("outcome") in (None, "completed") else 1)


class TrackioTracker:
    """A trackio run named after the run folder, in the project ``triscale``."""

    name = "trackio"

    def __init__(self, run_dir: Path):
        self.trackio, self.run_dir = require("trackio", "trackio", "--track trackio"), run_dir

    def start(self, run: str, config: dict[str, Any]) -> None:
        self.trackio.init(project="triscale", name=f"{run}-{run_id(self.run_dir)[:6]}", config=config, resume="allow",
                          embed=False)  # fmt: skip

    def log(self, step: int, values: dict[str, float]) -> None:
        self.trackio.log(values, step=step)

    def finish(self, summary: dict[str, Any]) -> None:
        self.trackio.finish()


TRACKERS: dict[str, type] = {t.name: t for t in (TensorBoardTracker, WandbTracker, TrackioTracker)}


def make_tracker(name: str, run_dir: str | Path) -> Tracker:
    """The tracker called ``name``; raises :class:`ConfigError` for an unknown one, MissingExtraError for the rest."""
    if name not in TRACKERS:
        raise ConfigError("--track", f"no tracker is called {name!r}", f"Known: {', '.join(TRACKERS)}")
    return TRACKERS[name](Path(run_dir))


def run_id(run_dir: Path) -> str:
    """The same id whenever the same folder is resumed."""
    return hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()[:16]


def metrics(event: Event) -> dict[str, float]:
    """The finite numbers of one event, named ``group/field``; lists by head or expert become their extremes and mean.

    Non-finite values are left out (services draw them as zero or refuse them); the event log keeps them.
    """
    group = GROUPS.get(event.kind)
    if group is None or "step" not in event.data:
        return {}
    found: dict[str, float] = {}
    for key, value in event.data.items():
        if key == "step":
            continue
        if event.kind == "logits" and key == "max_logits" and isinstance(value, dict):
            peaks = {f"{group}/{name}": _largest(heads) for name, heads in value.items()}
            found |= {name: peak for name, peak in peaks.items() if peak is not None}
            if found:
                found[f"{group}/all"] = max(found.values())
        else:
            found |= _flatten(f"{group}/{key}", value)
    return found


def _flatten(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, (int, float)):
        return {name: float(value)} if math.isfinite(value) else {}
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flatten(f"{name}/{key}", item).items()}
    numbers = [float(v) for v in value if isinstance(v, (int, float)) and math.isfinite(v)]
    if not numbers:
        return {}
    return {f"{name}/min": min(numbers), f"{name}/mean": sum(numbers) / len(numbers), f"{name}/max": max(numbers)}


def _largest(values: Any) -> float | None:
    values = values if isinstance(values, (list, tuple)) else [values]
    return max((float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)), default=None)


class Follower:
    """Reads new events of a run and passes them to one tracker, exactly once across resumed runs."""

    def __init__(self, run_dir: str | Path, tracker: Tracker):
        self.run_dir, self.tracker = Path(run_dir), tracker
        self.log, self.state_path = self.run_dir / "events.jsonl", self.run_dir / "trackers" / f"{tracker.name}.json"
        state = json.loads(self.state_path.read_text()) if self.state_path.exists() else {}
        self.offset: int = state.get("offset", 0)
        self.sent: dict[str, int] = state.get("sent", {})  # event kind -> last step sent
        self.summary: dict[str, Any] = {}
        self.started = False

    def drain(self) -> None:
        """Send everything complete that has not been sent."""
        for event in self._new_events():
            if event.kind == "run.end":
                self.summary = {k: v for k, v in event.data.items() if isinstance(v, (int, float, str))}
            values = metrics(event)
            if not values or event.data["step"] <= self.sent.get(event.kind, -1):
                continue
            self._start()
            self.tracker.log(int(event.data["step"]), values)
            self.sent[event.kind] = int(event.data["step"])

    def finish(self) -> None:
        """Send the rest and close the tracker."""
        self.drain()
        if self.started:
            self.tracker.finish(self.summary)
            self._save()

    def _start(self) -> None:
        if not self.started:
            file = self.run_dir / "config.toml"
            config = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            self.tracker.start(self.run_dir.name, config)
            self.started = True

    def _new_events(self) -> list[Event]:
        if not self.log.exists():
            return []
        with open(self.log, "rb") as file:
            file.seek(self.offset)
            block = file.read()
        block = block[: block.rfind(b"\n") + 1]  # a line being written is read next time
        self.offset += len(block)
        events: list[Event] = []
        for line in block.splitlines():
            event = Event.model_validate_json(line)
            if event.kind == "run.resume":  # later steps of this block were done again: send the ones that count
                events = [e for e in events if e.data.get("step", -1) <= event.data["step"]]
            events.append(event)
        return events

    def _save(self) -> None:
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"offset": self.offset, "sent": self.sent}))
        temporary.replace(self.state_path)


def follow(run_dir: str | Path, tracker: Tracker) -> None:
    """Send all that a run's event log holds and ``tracker`` has not seen, then close the tracker."""
    Follower(run_dir, tracker).finish()


@contextmanager
def tracking(run_dir: str | Path, names: Sequence[str], poll: float = 1.0) -> Iterator[None]:
    """Follow ``run_dir`` with the named trackers while the body runs; the rest is sent at its end, whatever happens.

    Raises for an unknown name or a missing package before the body starts. A tracker that fails later is dropped
    with a warning: the log has everything, and ``follow`` can send it afterwards. poll: seconds between looks.
    """
    followers = [Follower(run_dir, make_tracker(name, run_dir)) for name in dict.fromkeys(names)]
    if not followers:
        yield
        return
    stop = threading.Event()
    threads = [threading.Thread(target=_watch, args=(f, stop, poll), name=f"track-{f.tracker.name}", daemon=True)
               for f in followers]  # fmt: skip
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
            if thread.is_alive():
                print(f"warning: {thread.name} is still sending and was left behind", file=sys.stderr)


def _watch(follower: Follower, stop: threading.Event, poll: float) -> None:
    """One thread a tracker, so that a slow one delays no other; services also want all calls from one thread."""
    try:
        while not stop.wait(poll):
            follower.drain()
        follower.finish()
    except Exception as error:  # any failure of a third-party service
        message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        print(f"warning: tracking with {follower.tracker.name} stopped ({message}); training goes on, and the event "
              "log has every number", file=sys.stderr)  # fmt: skip
