"""``triscale study muon-attribution``: which ingredient of MuonClip carries its gain over AdamW?

Every arm is tuned on the smallest rung, then run through the ladder with paired seeds. An ingredient's share is the
part of MuonClip's log token multiplier that disappears without it (or that it adds), with the interval of that
difference.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from triscale.config import from_dict, overlay
from triscale.ladder.config import LadderConfig
from triscale.ladder.multiplier import as_factor
from triscale.ladder.report import write_report
from triscale.ladder.run import LadderRunner
from triscale.ladder.statistics import Estimate
from triscale.ladder.tune import tune, with_rates
from triscale.ladder.verdict import ArmResult, analyse
from triscale.train.config import Runtime
from triscale.train.progress import Progress
from triscale.train.run_directory import write_json

# arm: the optimizer's settings; qk_clip_threshold 0 = no clip
ARMS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw"},
    "adamw-rms": {"kind": "adamw", "update_rms": 0.2},
    "muon-no-decay": {"kind": "muonclip", "qk_clip_threshold": 0.0, "weight_decay": 0.0},
    "muon-no-rms": {"kind": "muonclip", "qk_clip_threshold": 0.0, "update_scale": "spectral"},
    "muon": {"kind": "muonclip", "qk_clip_threshold": 0.0},
    "muon-per-head": {"kind": "muonclip", "qk_clip_threshold": 0.0, "per_head": True},
    "muonclip": {"kind": "muonclip"},
}
# ingredient: (arm with it, arm without it)
INGREDIENTS = {
    "update RMS match on AdamW": ("adamw-rms", "adamw"),
    "orthogonalisation at equal RMS and decay": ("muon", "adamw-rms"),
    "weight decay": ("muon", "muon-no-decay"),
    "RMS match of the updates": ("muon", "muon-no-rms"),
    "per-head blocks": ("muon-per-head", "muon"),
    "QK-Clip": ("muonclip", "muon"),
}
LADDER: dict[str, Any] = {
    "name": "muon-attribution",
    "rates": [2e-3, 4e-3, 8e-3],
    "tune_fraction": 0.5,
    "base": {
        "data": {"corpus": {"kind": "python"}, "vocabulary_size": 2048},
        "schedule": {"kind": "wsd", "warmup_length": 10, "decay": 0.25},
        "train": {"batch_tokens": 2048, "row_length": 256, "micro_batch_tokens": 2048, "eval_tokens": 65536},
        "model": {"mixer": {"kind": "grouped_query_attention", "heads": 4, "kv_heads": 2}},
    },
    "rungs": [
        {
            "name": "small",
            "tokens": 300_000,
            "budgets": [0.5, 1.0, 2.0],
            "config": {"model": {"width": 64, "depth": 4}},
        },
        {
            "name": "large",
            "tokens": 400_000,
            "budgets": [0.5, 1.0, 2.0],
            "config": {"model": {"width": 128, "depth": 4}},
        },
    ],
}


def run(
    output: Path,
    *,
    seeds: list[int] | None = None,
    arms: list[str] | None = None,
    ladder: dict[str, Any] | None = None,
    runtime: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Tune and run what is missing, then write ``attribution.json`` and the ladder's report; prints the table.

    arms: names out of :data:`ARMS`, the baseline adamw always among them. ladder: overrides of :data:`LADDER`.
    runtime: device, threads, cache and the like.
    """
    names = ["adamw", *(name for name in (arms or ARMS) if name != "adamw")]
    tree = overlay(LADDER, ladder or {}) | {
        "seeds": seeds or [0, 1, 2],
        "arms": [{"name": name, "config": {"optimizer": ARMS[name]}} for name in names],
    }
    plan = from_dict(LadderConfig, tree, "muon-attribution")
    machine = from_dict(Runtime, runtime or {}, "runtime")
    with Progress("muon-attribution:") as progress:
        tuned = output / "tuning" / "tuning.json"
        known = json.loads(tuned.read_text())["arms"] if tuned.exists() else {}
        missing = tuple(name for name in names if name not in known)
        if missing:
            tune(plan, output / "tuning", machine, progress, missing)
        rated = with_rates(plan, json.loads(tuned.read_text()))
        record = LadderRunner(rated, output / "ladder", machine).run(progress)
    result = analyse(record)
    write_report(result, output / "ladder")
    by_name = {arm.name: arm for arm in result.arms}
    study = {
        "arms": {name: _arm(arm) for name, arm in by_name.items()},
        "ingredients": {title: shares(by_name, *pair) for title, pair in INGREDIENTS.items()},
        "rates": {arm.name: arm.learning_rate for arm in rated.arms},
    }
    write_json(output / "attribution.json", study)
    print(table(study))
    return study


def _arm(arm: ArmResult) -> dict[str, Any]:
    factor, interval = as_factor(arm.multipliers["tokens"])
    return {"multiplier": factor, "interval": interval, "verdict": arm.verdict, "n": arm.n, "diverged": arm.diverged}


def shares(arms: dict[str, ArmResult], with_it: str, without: str) -> dict[str, Any]:
    """The factor in tokens between two arms, its interval, and its share of MuonClip's log multiplier.

    The arms share the baseline's noise, so adding their variances overstates the error: the interval is conservative.
    The baseline's own log multiplier is exactly zero.
    """
    more, less = _log_multiplier(arms, with_it), _log_multiplier(arms, without)
    whole = _log_multiplier(arms, "muonclip")
    if more is None or less is None:
        return {"factor": None, "interval": None, "share": None}
    difference = more.mean - less.mean
    interval = None
    if more.se is not None and less.se is not None:
        joined = Estimate(difference, math.hypot(more.se, less.se), min(more.df, less.df), more.n)
        interval = as_factor(joined)[1]
    share = difference / whole.mean if whole is not None and whole.mean > 0 else None
    return {"factor": math.exp(difference), "interval": interval, "share": share}


def _log_multiplier(arms: dict[str, ArmResult], name: str) -> Estimate | None:
    if name == "adamw":
        return Estimate(0.0, 0.0, math.inf, 0)
    return arms[name].multipliers["tokens"] if name in arms else None


def table(study: dict[str, Any]) -> str:
    """Multipliers of the arms, then what each ingredient carries."""
    lines = ["arm            token multiplier over tuned AdamW"]
    for name, arm in study["arms"].items():
        lines.append(f"{name:<14} {_text(arm['multiplier'], arm['interval'])}  (n = {arm['n']}, {arm['verdict']})")
    lines += ["", "ingredient                                  tokens saved (factor)        share of MuonClip's gain"]
    for title, item in study["ingredients"].items():
        share = "unknown" if item["share"] is None else f"{item['share']:.0%}"
        lines.append(f"{title:<43} {_text(item['factor'], item['interval']):<28} {share}")
    return "\n".join(lines)


def _text(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else " (no interval)")
