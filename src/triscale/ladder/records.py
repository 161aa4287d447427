"""What a ladder leaves behind: one summary per finished run, and the record of the whole ladder.

A record holds everything the statistics and the report need, so a committed ``summary.json`` can be read years later
without the runs themselves.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triscale.config import ConfigError, from_dict, to_dict
from triscale.events import current_events

VERSION = 1
CURVE_POINTS = 120  # curves in a record are thinned to about this many points
SAME_BUDGET = 0.005  # budgets closer than this (relative) are the same budget
Curve = tuple[tuple[float, float], ...]


def same_budget(a: float, b: float) -> bool:
    return abs(a - b) <= SAME_BUDGET * max(a, b)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The end of one complete schedule: what ``tokens`` bought.

    flops, seconds: the whole cost of reaching this point alone (trunk up to the branch plus the branch's decay), not
    only the branch's share. loss: held-out nats per token; None if the branch diverged.
    """

    tokens: int
    flops: float
    seconds: float
    loss: float | None = None

    def __post_init__(self) -> None:
        if self.loss is not None and not math.isfinite(self.loss):
            object.__setattr__(self, "loss", None)
        if self.tokens <= 0:
            raise ValueError(f"tokens must be positive, got {self.tokens}")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One finished run.

    parameters: all of them; parameters_nonembedding: without the input embedding and an untied head.
    parameters_active: those one token uses (None = all). loss: final held-out nats per token, None only if
    ``diverged``. curve: [tokens, held-out loss]; the first point should be the untrained model (tokens 0), because a
    diverged run is scored with it. budgets: at least the run's own end; the baseline lists the end of every decay
    branch of its trunk. max_logit: the largest attention logit seen; spikes: loss spikes counted by the trainer.
    train_loss_curve, grad_norm_curve, max_logit_curve: [tokens, value], for the report's plots.
    """

    arm: str
    rung: str
    seed: int
    parameters: int
    parameters_nonembedding: int
    parameters_active: int | None = None
    tokens: int
    flops: float
    seconds: float
    loss: float | None = None
    bits_per_byte: float | None = None
    curve: Curve = ()
    budgets: tuple[Budget, ...] = ()
    diverged: bool = False
    spikes: int = 0
    max_logit: float | None = None
    train_loss_curve: Curve = ()
    grad_norm_curve: Curve = ()
    max_logit_curve: Curve = ()
    corpus_hash: str
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    config_hash: str
    learning_rate: float

    def __post_init__(self) -> None:
        for name in ("loss", "bits_per_byte", "max_logit"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                object.__setattr__(self, name, None)
        for name in ("curve", "train_loss_curve", "grad_norm_curve", "max_logit_curve"):
            object.__setattr__(self, name, _finite(getattr(self, name)))
        if self.loss is None and not self.diverged:
            raise ValueError(f"{self.label}: the loss is missing or not finite, so the run must be marked diverged")
        if min(self.tokens, self.parameters, self.flops) <= 0 or (self.seconds <= 0 and not self.diverged):
            raise ValueError(f"{self.label}: tokens, parameters, flops and seconds must be positive")
        if not self.budgets:
            own = Budget(tokens=self.tokens, flops=self.flops, seconds=self.seconds, loss=self.loss)
            object.__setattr__(self, "budgets", (own,))

    @property
    def label(self) -> str:
        return f"{self.arm}/{self.rung}/seed {self.seed}"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.arm, self.rung, self.seed

    def at(self, tokens: float) -> Budget | None:
        """The complete schedule of this run that ended at ``tokens``, if there is one."""
        if same_budget(self.tokens, tokens):
            return Budget(tokens=self.tokens, flops=self.flops, seconds=self.seconds, loss=self.loss)
        return next((b for b in self.budgets if same_budget(b.tokens, tokens)), None)

    def untrained_loss(self) -> float | None:
        """The held-out loss before training (the first hundredth at most): what a diverged run is charged with."""
        return max((loss for tokens, loss in self.curve if tokens <= 0.01 * self.tokens), default=None)

    def save(self, path: str | Path) -> None:
        _write_json(Path(path), {"version": VERSION, **to_dict(self)})


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A model size with its token budget. match: what the arms of this rung were made equal in."""

    name: str
    tokens: int
    match: str = "parameters"

    def __post_init__(self) -> None:
        if self.match not in ("parameters", "active", "flops", "none"):
            raise ValueError(f"match must be parameters, active, flops or none, got {self.match!r}")


@dataclass(frozen=True, kw_only=True)
class LadderRecord:
    """A whole ladder. arms: the planned arms without the baseline, in the order of the report; seeds: the planned
    seeds; ladder: the resolved TOML; environment: machine and versions of the process that wrote the record."""

    name: str
    baseline: str
    arms: tuple[str, ...]
    rungs: tuple[Rung, ...]
    seeds: tuple[int, ...]
    runs: tuple[RunSummary, ...] = ()
    ladder: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.baseline in self.arms:
            raise ValueError(f"the baseline {self.baseline!r} is also listed as an arm")
        seen: set[tuple[str, str, int]] = set()
        rungs, arms = {r.name for r in self.rungs}, {self.baseline, *self.arms}
        for run in self.runs:
            if run.key in seen:
                raise ValueError(f"{run.label} appears twice")
            if run.rung not in rungs or run.arm not in arms:
                raise ValueError(f"{run.label} belongs to no planned rung and arm")
            seen.add(run.key)

    def find(self, arm: str, rung: str, seed: int) -> RunSummary | None:
        return next((run for run in self.runs if run.key == (arm, rung, seed)), None)

    def of(self, arm: str, rung: str) -> list[RunSummary]:
        """The finished runs of one cell, by seed."""
        return sorted((r for r in self.runs if r.arm == arm and r.rung == rung), key=lambda r: r.seed)

    def save(self, path: str | Path) -> None:
        """Write atomically; ``path`` may be the file or its folder (then ``summary.json``)."""
        path = Path(path)
        _write_json(path / "summary.json" if path.is_dir() else path, {"version": VERSION, **to_dict(self)})


def load_run(path: str | Path) -> RunSummary:
    """Read one run's ``summary.json``; raises :class:`ConfigError` naming the file and the field."""
    return from_dict(RunSummary, _read_json(Path(path)), str(path))


def load_record(path: str | Path) -> LadderRecord:
    """Read a record from its file or from the folder that holds it as ``summary.json``."""
    path = Path(path)
    path = path / "summary.json" if path.is_dir() else path
    values = _read_json(path)
    if "runs" not in values:
        raise ConfigError(str(path), "this is not the summary of a ladder", "Name the ladder's folder, not one run's")
    return from_dict(LadderRecord, values, str(path))


def collect_runs(folder: str | Path) -> tuple[RunSummary, ...]:
    """Every finished run below ``folder``: files called ``summary.json`` except the ladder's own.

    Curves missing from a summary are filled from the ``events.jsonl`` beside it.
    """
    found = []
    for path in sorted(Path(folder).rglob("summary.json")):
        values = _read_json(path)
        if "runs" in values:
            continue
        found.append(with_event_curves(from_dict(RunSummary, values, str(path)), path.parent))
    return tuple(found)


def with_event_curves(run: RunSummary, folder: str | Path) -> RunSummary:
    """``run`` with training-loss, gradient-norm and max-logit curves read from ``folder/events.jsonl``, where it lacks them."""
    path = Path(folder) / "events.jsonl"
    if (run.train_loss_curve and run.grad_norm_curve and run.max_logit_curve) or not path.exists():
        return run
    losses, grad_norms, logits, tokens = [], [], [], 0.0
    for event in current_events(path):
        if event.kind == "step":
            tokens = float(event.data["tokens"])
            losses.append((tokens, event.data["loss"]))
            grad_norms.append((tokens, event.data["grad_norm"]))
        elif event.kind == "logits":
            logits.append((float(event.data.get("tokens", tokens)), _largest(event.data["max_logits"])))
    return replace(
        run,
        train_loss_curve=run.train_loss_curve or thin(losses, pick="mean"),
        grad_norm_curve=run.grad_norm_curve or thin(grad_norms),
        max_logit_curve=run.max_logit_curve or thin(logits),
    )


def thin(points: Iterable[tuple[float, Any]], limit: int = CURVE_POINTS, pick: str = "max") -> Curve:
    """At most ``limit`` finite points, first and last kept; of each stretch the largest (a spike must show) or mean."""
    points = tuple((x, float(f"{y:.6g}")) for x, y in _finite(points))
    if len(points) <= limit:
        return points
    inner, stretch = points[1:-1], math.ceil((len(points) - 2) / max(limit - 2, 1))
    parts = [inner[i : i + stretch] for i in range(0, len(inner), stretch)]
    if pick == "max":
        return (points[0], *(max(part, key=lambda p: p[1]) for part in parts), points[-1])
    middle = lambda part, axis: float(f"{sum(p[axis] for p in part) / len(part):.6g}")
    return (points[0], *((middle(part, 0), middle(part, 1)) for part in parts), points[-1])


def _finite(points: Iterable[tuple[float, Any]]) -> Curve:
    return tuple((float(x), float(y)) for x, y in points if _is_finite(x) and _is_finite(y))


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _largest(value: Any) -> Any:
    """The largest number in nested lists or tables; the event log writes a non-finite one as a string."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        numbers = [n for n in map(_largest, value) if _is_finite(n)]
        return max(numbers, default=None)
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(str(path), "no such file") from error
    except ValueError as error:
        raise ConfigError(str(path), f"is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), "expected a JSON object")
    version = values.pop("version", None)
    if version != VERSION:
        raise ConfigError(f"{path}: version", f"{version!r} is not supported", f"This release reads version {VERSION}")
    return values


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(_dump(values) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _dump(values: dict[str, Any]) -> str:
    """JSON with one line a run, so that a committed record is small and its changes readable."""
    compact = lambda value: json.dumps(value, allow_nan=False, ensure_ascii=False)
    lines = []
    for key, value in values.items():
        if key == "runs":
            rows = ",\n".join("  " + compact(run) for run in value)
            lines.append(f'"runs": [\n{rows}\n ]' if value else '"runs": []')
        else:
            lines.append(f"{compact(key)}: {compact(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}"
