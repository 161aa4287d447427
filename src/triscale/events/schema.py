"""The event envelope and the kinds of events.

One schema serves training, serving, swarms and RL. Progress lines, plots, reports, the spawn ledger, OpenTelemetry
export and RL trajectories are readers of it.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

VERSION = 1

# kind -> the fields its data must have; writers may add more. A new kind is added here with its writer.
KINDS: dict[str, tuple[str, ...]] = {
    "run.start": (),
    "run.resume": ("step",),
    "run.end": ("outcome",),
    "config": ("config",),
    "step": ("step", "loss", "lr", "grad_norm", "tokens", "flops", "seconds", "tokens_per_s"),
    "eval": ("step", "loss"),
    "checkpoint": ("step", "path"),
    "warning": ("message",),
    "logits": ("step", "max_logits"),
    "router": ("step", "layers"),
    "spike": ("step", "loss"),
    "swarm.start": ("task", "limits"),
    "swarm.resume": ("session", "spent"),
    "agent.create": ("agent", "name"),
    "task.assign": ("task", "agent"),
    "task.start": ("task", "attempt"),
    "task.end": ("task", "outcome", "reason"),
    "model.call": ("call", "agent"),
    "model.reply": ("call", "agent", "tokens_in", "tokens_out", "tokens_cached", "cost", "seconds"),
    "tool.call": ("call", "agent", "name"),
    "tool.result": ("call", "agent", "name", "outcome", "seconds"),
    "stage": ("agent", "turn", "critical_steps"),
    "limit": ("limit", "value"),
    "limiter": ("endpoint", "event", "capacity"),
    "result": ("outcome",),
    "request.start": ("request",),
    "request.end": ("request", "outcome"),
    "cache": (),
    "rollout": (),
    "reward": ("parts",),
    "update": ("step",),
}


class Event(BaseModel):
    """One line of ``events.jsonl``.

    time: seconds since the epoch (or of a virtual clock). span/parent: ids that make events a tree.
    """

    model_config = ConfigDict(extra="forbid")

    v: int = VERSION
    time: float
    run: str
    span: str | None = None
    parent: str | None = None
    kind: str
    data: dict[str, Any] = Field(default_factory=dict)


def check_event(kind: str, data: dict[str, Any]) -> None:
    """Raise ``ValueError`` for an unknown kind or missing data fields: a programming error of the writer."""
    if kind not in KINDS:
        raise ValueError(f"event kind {kind!r} is not in the schema; add it to triscale.events.schema.KINDS")
    missing = [name for name in KINDS[kind] if name not in data]
    if missing:
        raise ValueError(f"event {kind!r} lacks the fields {missing}")
