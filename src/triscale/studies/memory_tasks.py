"""Which mixers remember? Palindrome, associative recall and stacks for KDA, GDN, full attention and an LSTM.

The shape of Kimi Linear's section 5.1 (arXiv 2510.26692) scaled to a CPU: 2 layers, 2 heads of 32, lengths 64, 128 and
256. A cell (task, length, mixer) trains one model per learning rate, each for an equal share of the cell's seconds or
until it answers 99.9 % of fresh questions, and reports the best. Finished cells are kept: running again resumes.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triscale import __version__
from triscale.config import from_dict, require
from triscale.data.tasks import TASKS, TaskRows
from triscale.models import count_parameters
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.optim.adamw import AdamW

HEADS, HEAD_DIM, DEPTH = 2, 32, 2
DELTA = {"kind": "delta_attention", "heads": HEADS, "head_dim": HEAD_DIM}
ARMS: dict[str, dict[str, Any]] = {
    "KDA": DELTA,
    "GDN": {**DELTA, "decay": "head"},
    "attention": {"kind": "grouped_query_attention", "heads": HEADS, "head_dim": HEAD_DIM},
    "LSTM": {"kind": "lstm"},
}
SOLVED = 0.999
EVALUATION_ROWS = 256


def run(
    output: Path,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = (64, 128, 256),
    arms: Sequence[str] = tuple(ARMS),
    learning_rates: Sequence[float] = (3e-3, 1e-3),
    seconds: float = 120.0,
    batch_tokens: int = 4096,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Train every cell for at most ``seconds`` and write results.json, README.md and the figure into ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    cells = output / "cells"
    cells.mkdir(exist_ok=True)
    results = []
    for task in tasks:
        for length in lengths:
            for arm in arms:
                settings = {"task": task, "length": length, "arm": arm, "learning_rates": list(learning_rates),
                            "seconds": seconds, "batch_tokens": batch_tokens, "seed": seed}  # fmt: skip
                row = _cell(cells / f"{task}-{length}-{arm}.json", settings)
                results.append(row)
                print(
                    f"{task:<20} {length:>4} {arm:<10} accuracy {row['accuracy']:.3f}  {row['steps']} steps", flush=True
                )
    meta = {
        "triscale": __version__, "torch": torch.__version__, "threads": torch.get_num_threads(), "heads": HEADS,
        "head_dim": HEAD_DIM, "depth": DEPTH, "seed": seed, "seconds_a_cell": seconds, "batch_tokens": batch_tokens,
        "learning_rates": list(learning_rates), "n": EVALUATION_ROWS,
    }  # fmt: skip
    (output / "results.json").write_text(json.dumps({"meta": meta, "rows": results}, indent=1) + "\n", encoding="utf-8")
    (output / "README.md").write_text(_readme(results, meta), encoding="utf-8")
    _figure(results, output / "accuracy.svg")
    return results


def _cell(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The best model over learning rates; read back if the same cell was finished before."""
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["settings"] == settings:
            return saved["result"]
    best: dict[str, Any] = {"accuracy": -1.0}
    for lr in settings["learning_rates"]:
        found = _train(settings, lr, settings["seconds"] / len(settings["learning_rates"]))
        best = max(best, found, key=lambda r: r["accuracy"])
        if best["accuracy"] >= SOLVED:
            break
    result = {key: settings[key] for key in ("task", "length", "arm")} | best
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"settings": settings, "result": result}), encoding="utf-8")
    temporary.replace(path)
    return result


def _train(settings: dict[str, Any], lr: float, seconds: float) -> dict[str, Any]:
    """One model; the learning rate warms up over 50 steps and falls to a tenth along a cosine of the time spent."""
    task, length = TASKS[settings["task"]](), settings["length"]
    config = {"width": HEADS * HEAD_DIM, "depth": DEPTH, "vocabulary": task.vocabulary, "mixer": ARMS[settings["arm"]]}
    model = from_dict(Decoder.Config, config).build(seed=settings["seed"]).train()
    optimizer = AdamW(model, lr=lr, weight_decay=0.0)
    generator = np.random.default_rng(settings["seed"])
    rows = max(1, settings["batch_tokens"] // length)
    start, step, accuracy, next_check = time.perf_counter(), 0, 0.0, 0.1
    while (spent := (time.perf_counter() - start) / seconds) < 1:
        rate = lr * min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * spent))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = _batch(task.rows(rows, length, generator))
        optimizer.zero_grad(set_to_none=True)
        assert batch.loss_weights is not None
        loss = model(batch, output="loss") / batch.loss_weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if spent >= next_check:
            next_check = spent + 0.05
            accuracy = _accuracy(model, task, length, settings["seed"])
            _tell(f"{settings['task']} {length} {settings['arm']}, lr {lr:g}: {spent:4.0%}, step {step}, "
                  f"accuracy {accuracy:.3f}")  # fmt: skip
            if accuracy >= SOLVED:
                break
    accuracy = accuracy if accuracy >= SOLVED else _accuracy(model, task, length, settings["seed"])
    return {
        "accuracy": accuracy, "lr": lr, "steps": step, "seconds": time.perf_counter() - start,
        "loss": float(loss.detach()), "parameters": count_parameters(model)["total"],
    }  # fmt: skip


def _tell(line: str) -> None:
    """Progress: one line rewritten on a terminal, plain lines elsewhere."""
    terminal = sys.stderr.isatty()
    print(f"\r{line:<100}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)


def _batch(rows: TaskRows) -> TokenBatch:
    return TokenBatch.from_rows(
        torch.from_numpy(rows.tokens), None, torch.from_numpy(rows.targets), torch.from_numpy(rows.weights)
    )


@torch.no_grad()
def _accuracy(model: Decoder, task: Any, length: int, seed: int) -> float:
    """Share of right answers in EVALUATION_ROWS rows that training never draws (another stream of the generator)."""
    generator = np.random.default_rng([seed, 1])
    right = count = 0.0
    model.eval()
    for _ in range(0, EVALUATION_ROWS, 64):
        batch = _batch(task.rows(64, length, generator))
        assert batch.targets is not None and batch.loss_weights is not None
        correct = model(batch, output="logits").argmax(-1) == batch.targets
        right += float((correct * batch.loss_weights).sum())
        count += float(batch.loss_weights.sum())
    model.train()
    return right / count


def _readme(results: list[dict[str, Any]], meta: dict[str, Any]) -> str:
    lengths, arms = _ordered(results, "length"), _ordered(results, "arm")
    lines = ["# Memory tasks", "", f"Accuracy (%) on {meta['n']} fresh rows, best of {len(meta['learning_rates'])} "
             f"learning rates, at most {meta['seconds_a_cell']:g} s a cell, one seed. 2 layers, 2 heads of 32.", ""]  # fmt: skip
    for task in _ordered(results, "task"):
        lines += [f"## {task}", "", "| length | " + " | ".join(arms) + " |", "|---" * (len(arms) + 1) + "|"]
        for length in lengths:
            found = {r["arm"]: r for r in results if r["task"] == task and r["length"] == length}
            cells = [f"{100 * found[a]['accuracy']:.1f}" if a in found else "" for a in arms]
            lines.append(f"| {length} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join([*lines, "![Accuracy by length](accuracy.svg)", ""])


def _figure(results: list[dict[str, Any]], path: Path) -> None:
    pyplot = require("matplotlib.pyplot", "report", "the study's figure")
    tasks, arms = _ordered(results, "task"), _ordered(results, "arm")
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(4 * len(tasks), 3.2), sharey=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for arm in arms:
            points = [(r["length"], 100 * r["accuracy"]) for r in results if r["task"] == task and r["arm"] == arm]
            axis.plot(*zip(*points, strict=True), marker="o", label=arm)
        axis.set(title=task, xlabel="length (tokens)", xscale="log", ylim=(0, 102))
        axis.set_xticks(_ordered(results, "length"), [str(n) for n in _ordered(results, "length")])
    axes[0][0].set_ylabel("accuracy (%)")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _ordered(results: list[dict[str, Any]], key: str) -> list:
    return list(dict.fromkeys(r[key] for r in results))
