"""Does QK-Clip hold growing attention logits, what does it do to the loss, and does it cost retrieval?

Part 1, growth: a transformer without QK-norm under Muon, at an ordinary and at two high learning rates, with and
without the clip, on paired seeds: the largest logit of every step, spikes, divergence, and the loss curves.
Part 2, retrieval: a two-layer model looks up facts by their name among many others (a needle task in tokens), under a
sweep of thresholds: does a bound on the logits blunt attention?
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from triscale.config import ConfigError, from_dict, overlay
from triscale.data.prepare import PreparedData, prepare
from triscale.events import current_events
from triscale.ladder.run import LadderRunner
from triscale.train.config import RunConfig, Runtime
from triscale.train.loop import Trainer
from triscale.train.plan import plan as plan_run
from triscale.train.progress import Progress
from triscale.train.run_directory import write_json

from . import qk_clip_page, qk_clip_retrieval
from .page import command_line, defaults, header

QUESTION = "Does QK-Clip hold growing attention logits, and does it cost retrieval?"
BASE: dict[str, Any] = {
    "data": {"corpus": {"kind": "python"}, "vocabulary_size": 1024},
    "model": {"width": 64, "depth": 4, "mixer": {"kind": "grouped_query_attention", "heads": 4}},
    "schedule": {"kind": "wsd", "warmup_length": 10, "decay": 0.25},
    "train": {"batch_tokens": 2048, "row_length": 128, "micro_batch_tokens": 2048, "eval_tokens": 32768,
              "precision": "fp32"},
}  # fmt: skip
UNREACHED = 1e9  # as a threshold: every step is measured, none is clipped


def run(
    output: Path,
    *,
    seeds: Any = (0, 1, 2),
    rates: Any = (1.6e-2, 6.4e-2, 2.56e-1),
    threshold: float = 30.0,
    tokens: int = 400_000,
    thresholds: Any = (0.0, 10.0, 5.0, 3.0, 2.0, 1.0),
    retrieval_steps: int = 360,
    retrieval_facts: int = 64,
    base: dict[str, Any] | None = None,
    runtime: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run both parts (what is already there is read back); write results.json, curves.json, README.md and qk-clip.svg.

    threshold: of part 1; tokens: the training budget of each of its runs; base: overrides of its runs. thresholds: of
    part 2, 0 = no clip. runtime: device, threads, cache and the like.
    """
    settings = {name: value for name, value in locals().items() if name != "output"}
    if not threshold > 0:
        raise ConfigError("threshold", f"{threshold} must be positive")
    machine = _runtime(runtime)
    output.mkdir(parents=True, exist_ok=True)
    with Progress("qk-clip:") as progress:
        growth, corpus = _growth(output / "runs", settings, machine, progress)
        retrieval = qk_clip_retrieval.sweep(
            output / "runs", seeds, thresholds, retrieval_steps, retrieval_facts, progress
        )
    command = command_line("qk-clip", run, settings)
    study = header(QUESTION, command, settings) | {"corpus": corpus, "growth": growth, "retrieval": retrieval}
    curves = ("max_logit_curve", "loss_curve")
    rows = [{key: value for key, value in row.items() if key not in curves} for row in growth]
    write_json(output / "results.json", study | {"growth": rows})
    (output / "curves.json").write_text(json.dumps(growth), encoding="utf-8")
    print(qk_clip_page.write(study, overlay(BASE, base or {}), output))
    return study


def plan(**settings: Any) -> str:
    """What :func:`run` with these settings would cost; times one step of each part."""
    chosen = defaults(run) | settings
    machine = _runtime(chosen["runtime"])
    count = 2 * len(chosen["rates"]) * len(chosen["seeds"])
    one = plan_run(_config(chosen, chosen["rates"][0], chosen["threshold"], 0), machine).minutes
    more = len(chosen["thresholds"]) * len(chosen["seeds"])
    step = qk_clip_retrieval.step_seconds(chosen["retrieval_facts"])
    other = step * chosen["retrieval_steps"] / 60
    return (f"growth: {count} runs of {chosen['tokens']:,} tokens, about {one:.1f} minutes each\n"
            f"retrieval: {more} runs of {chosen['retrieval_steps']} steps, about {other:.1f} minutes each\n"
            f"together about {count * one + more * other:.0f} minutes on this machine")  # fmt: skip


def _runtime(given: dict[str, Any] | None) -> Runtime:
    return from_dict(Runtime, {"checkpoint_seconds": 60.0, "keep": 1, **(given or {})}, "runtime")


def _config(settings: dict[str, Any], rate: float, limit: float, seed: int) -> RunConfig:
    optimizer = {"kind": "muonclip", "lr": rate, "qk_clip_threshold": limit}
    changes = {"seed": seed, "optimizer": optimizer, "train": {"tokens": settings["tokens"]}}
    return from_dict(RunConfig, overlay(overlay(BASE, settings["base"] or {}), changes), "qk-clip")


def _growth(
    folder: Path, settings: dict[str, Any], runtime: Runtime, progress: Progress
) -> tuple[list[dict[str, Any]], str]:
    """One row a run, and the corpus hash."""
    cells = [(rate, name, limit, seed) for rate in settings["rates"]
             for name, limit in (("muon", UNREACHED), ("muonclip", settings["threshold"]))
             for seed in settings["seeds"]]  # fmt: skip
    results: list[dict[str, Any]] = []
    data: PreparedData | None = None
    for number, (rate, name, limit, seed) in enumerate(cells, 1):
        path = folder / f"growth_lr{rate:g}_{name}_seed{seed}"
        progress.title = f"[{number}/{len(cells)}] {path.name}"
        config = _config(settings, rate, limit, seed)
        data = data or prepare(config.data, runtime.cache_dir, progress.preparing)
        trainer = Trainer(config, runtime, path, listeners=(progress,), prepared=data)
        result = LadderRunner.train(trainer)
        results.append({"rate": rate, "arm": name, "seed": seed, **_measured(path, result)})
    assert data is not None
    return results, data.report.corpus_hash


def _measured(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    events = current_events(path / "events.jsonl")
    logits = [(e.data["step"], _round(_peak(e.data["max_logits"]))) for e in events if e.kind == "logits"]
    seen = [value for _, value in logits if value is not None]
    return {
        "loss": result["loss"], "spikes": result["spikes"], "seconds": result["seconds"],
        "diverged_at": result.get("diverged_at"),
        "clipped_heads": max((e.data["clipped"] for e in events if e.kind == "logits"), default=0),
        "max_logit": max(seen, default=None), "last_logit": logits[-1][1] if logits else None,
        "max_logit_curve": logits,
        "loss_curve": [(e.data["step"], _round(e.data["loss"])) for e in events if e.kind == "step"],
    }  # fmt: skip


def _peak(layers: dict[str, list[Any]]) -> float:
    return max(float(value) for heads in layers.values() for value in heads)


def _round(value: float) -> float | None:
    """Five digits are enough for a curve; None for what is not a number."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
