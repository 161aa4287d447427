"""Which ingredient of MuonClip carries its gain over AdamW?

Every arm is tuned on the smallest rung, then run through the ladder on paired seeds. Three steps lead from AdamW to
MuonClip (match the updates' RMS, orthogonalise them, clip the logits), and their shares of its log token multiplier add
up to one; two ingredients are taken away from Muon (weight decay, the RMS match), and one is added (per-head blocks).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triscale.config import ConfigError, from_dict, overlay, to_dict
from triscale.ladder.config import LadderConfig
from triscale.ladder.contrast import contrasts
from triscale.ladder.multiplier import as_factor
from triscale.ladder.report import write_report
from triscale.ladder.run import LadderRunner
from triscale.ladder.tune import tune, with_rates
from triscale.ladder.verdict import ArmResult, LadderResult, analyse
from triscale.train.config import Runtime
from triscale.train.progress import Progress
from triscale.train.run_directory import write_json

from . import muon_attribution_page
from .cost import ladder_cost
from .page import command_line, defaults, header

QUESTION = "Which ingredient of MuonClip carries its gain over AdamW?"
BASELINE, WHOLE = "adamw", "muonclip"
# arm: the optimizer's settings; qk_clip_threshold 0 = no clip. AdamW decays too, by the same 0.1.
ARMS: dict[str, dict[str, Any]] = {
    BASELINE: {"kind": "adamw"},
    "adamw-rms": {"kind": "adamw", "update_rms": 0.2},
    "muon-no-decay": {"kind": "muonclip", "qk_clip_threshold": 0.0, "weight_decay": 0.0},
    "muon-no-rms": {"kind": "muonclip", "qk_clip_threshold": 0.0, "update_scale": "spectral"},
    "muon": {"kind": "muonclip", "qk_clip_threshold": 0.0},
    "muon-per-head": {"kind": "muonclip", "qk_clip_threshold": 0.0, "per_head": True},
    WHOLE: {"kind": "muonclip"},
}
# ingredient: (how it is measured, arm with it, arm without it)
INGREDIENTS = {
    "RMS match, on AdamW": ("step", "adamw-rms", BASELINE),
    "orthogonalisation, at equal RMS and decay": ("step", "muon", "adamw-rms"),
    "QK-Clip": ("step", WHOLE, "muon"),
    "weight decay": ("removed", "muon", "muon-no-decay"),
    "RMS match, on Muon": ("removed", "muon", "muon-no-rms"),
    "per-head blocks": ("added", "muon-per-head", "muon"),
}
LADDER: dict[str, Any] = {
    "name": "muon-attribution",
    "rates": [4e-3, 8e-3, 1.6e-2],
    "tune_fraction": 0.5,
    "base": {
        "data": {"corpus": {"kind": "python"}, "vocabulary_size": 1024},
        "schedule": {"kind": "wsd", "warmup_length": 40, "decay": 0.25},
        "train": {"batch_tokens": 2048, "row_length": 128, "micro_batch_tokens": 2048, "eval_tokens": 32768,
                  "precision": "fp32"},
        "model": {"mixer": {"kind": "grouped_query_attention", "heads": 4, "kv_heads": 2}},
    },
    "rungs": [
        {"name": "small", "tokens": 400_000, "budgets": [0.5, 1.0, 2.0, 3.0],
         "config": {"model": {"width": 48, "depth": 3}}},
        {"name": "large", "tokens": 400_000, "budgets": [0.5, 1.0, 2.0, 3.0],
         "config": {"model": {"width": 64, "depth": 4}}},
    ],
}  # fmt: skip


def run(
    output: Path,
    *,
    seeds: Any = (0, 1, 2),
    arms: Any = tuple(ARMS),
    ladder: dict[str, Any] | None = None,
    runtime: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Tune and run what is missing; write results.json, README.md and attribution.svg, the ladder's report below runs.

    arms: names out of :data:`ARMS`, the baseline adamw always among them. ladder: overrides of :data:`LADDER`.
    runtime: device, threads, cache and the like.
    """
    settings = {"seeds": seeds, "arms": arms, "ladder": ladder}
    planned = _ladder(seeds, arms, ladder)
    machine = _runtime(runtime)
    with Progress("muon-attribution:") as progress:
        tuning = tune(planned, output / "runs" / "tuning", machine, progress)
        rated = with_rates(planned, tuning)
        record = LadderRunner(rated, output / "runs" / "ladder", machine).run(progress)
    result = analyse(record)
    write_report(result, output / "runs" / "ladder" / "report")
    command = command_line("muon-attribution", run, settings)
    study = header(QUESTION, command, settings) | {
        "corpus": sorted({one.corpus_hash for one in record.runs}),
        "ladder": to_dict(rated),
        "tuning": {rung: row["arms"] for rung, row in tuning["rungs"].items()},
        "baseline": {rung.name: [one.loss for one in record.of(BASELINE, rung.name)] for rung in record.rungs},
        "arms": {arm.name: _arm(result, arm) for arm in result.arms},
        "ingredients": {title: ingredient(result, *how) for title, how in INGREDIENTS.items()},
    }  # fmt: skip
    write_json(output / "results.json", study)
    print(muon_attribution_page.write(study, output))
    return study


def plan(**settings: Any) -> str:
    """What :func:`run` with these settings would cost."""
    chosen = defaults(run) | settings
    ladder = _ladder(chosen["seeds"], chosen["arms"], chosen["ladder"])
    return ladder_cost([ladder], _runtime(chosen["runtime"]), tuned=True)


def _runtime(given: dict[str, Any] | None) -> Runtime:
    return from_dict(Runtime, {"log_logits_every": 10, **(given or {})}, "runtime")


def _ladder(seeds: Any, arms: Any, ladder: dict[str, Any] | None) -> LadderConfig:
    for name in arms:
        if name not in ARMS:
            raise ConfigError("study.muon-attribution.arms", f"{name!r} is unknown", f"Known: {', '.join(ARMS)}")
    names = [BASELINE, *(name for name in arms if name != BASELINE)]
    tree = overlay(LADDER, ladder or {}) | {
        "seeds": list(seeds),
        "arms": [{"name": name, "config": {"optimizer": ARMS[name]}} for name in names],
    }
    return from_dict(LadderConfig, tree, "muon-attribution")


def _arm(result: LadderResult, arm: ArmResult) -> dict[str, Any]:
    factor, interval = as_factor(arm.multipliers["tokens"])
    runs = [run for run in result.record.runs if run.arm == arm.name]
    return {
        "multiplier": factor, "interval": interval, "verdict": arm.verdict, "n": arm.n, "diverged": arm.diverged,
        "extrapolated": arm.extrapolated,
        "loss_difference": arm.pooled.mean if arm.pooled else None,
        "loss_interval": arm.pooled.interval if arm.pooled else None,
        "losses": {rung.name: [r.loss for r in result.record.of(arm.name, rung.name)] for rung in result.record.rungs},
        "max_logit": max((r.max_logit for r in runs if r.max_logit is not None), default=None),
    }  # fmt: skip


def ingredient(result: LadderResult, how: str, with_it: str, without: str) -> dict[str, Any]:
    """The factor in tokens between two arms and its share of MuonClip's log multiplier, each with its interval.

    Nulls where an arm was not run or no seed pair is common to the arms.
    """
    entry: dict[str, Any] = {"how": how, "with": with_it, "without": without, "factor": None, "interval": None,
                             "share": None, "share_interval": None, "n": 0}  # fmt: skip
    pairs = {arm.name: [rung.pairs for rung in arm.rungs] for arm in result.arms}
    if not {with_it, without} - {BASELINE} <= pairs.keys():
        return entry
    difference = {with_it: 1.0, without: -1.0}
    both = contrasts({name: pairs[name] for name in difference if name != BASELINE}, result.curves)
    if both is not None:
        estimate = both.estimate(difference)
        entry["factor"], entry["interval"] = as_factor(estimate)
        entry["n"] = estimate.n
    three = {name: pairs[name] for name in (*difference, WHOLE) if name != BASELINE and name in pairs}
    if WHOLE in three and (joint := contrasts(three, result.curves)) is not None:
        entry["share"], entry["share_interval"] = joint.ratio(difference, {WHOLE: 1.0})
    return entry
