"""Which mixers remember? Palindrome, associative recall and stacks for KDA, GDN, full attention and an LSTM.

The shape of Kimi Linear's section 5.1 (arXiv 2510.26692) scaled to a CPU: 2 layers, 2 heads of 32, lengths 64, 128 and
256. In a cell (task, length, mixer) the learning rates compete for the first part of the seconds, and the best goes on to
their end or until it answers 99.9 % of fresh questions. Finished cells are kept: running again resumes.
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

from .page import defaults

HEADS, HEAD_DIM, DEPTH = 2, 32, 2
DELTA = {"kind": "delta_attention", "heads": HEADS, "head_dim": HEAD_DIM}
ARMS: dict[str, dict[str, Any]] = {
    "KDA": DELTA,
    "GDN": {**DELTA, "decay": "head"},
    "attention": {"kind": "grouped_query_attention", "heads": HEADS, "head_dim": HEAD_DIM},
    "LSTM": {"kind": "lstm"},
}
SOLVED = 0.999
EVALUATION_ROWS, CHECK_ROWS = 256, 32
TRIAL = 0.3  # share of a cell in which its learning rates compete


def run(
    output: Path,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = (64, 128, 256),
    arms: Sequence[str] = tuple(ARMS),
    learning_rates: Sequence[float] = (3e-3, 1e-3),
    seconds: float = 120.0,
    batch_tokens: int = 2048,
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


def plan(**settings: Any) -> str:
    """What :func:`run` with these settings would cost at most: a cell ends early when its task is solved."""
    chosen = defaults(run) | settings
    cells = math.prod(len(chosen[key]) for key in ("tasks", "lengths", "arms"))
    return (f"{cells} cells of at most {chosen['seconds']:g} seconds\n"
            f"together at most {cells * chosen['seconds'] / 60:.0f} minutes")  # fmt: skip


def _cell(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The cell's result; read back if the same cell was finished before."""
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["settings"] == settings:
            return saved["result"]
    result = {key: settings[key] for key in ("task", "length", "arm")} | _race(settings)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"settings": settings, "result": result}), encoding="utf-8")
    temporary.replace(path)
    return result


def _race(settings: dict[str, Any]) -> dict[str, Any]:
    """Every learning rate gets an equal share of the first TRIAL of the cell's seconds; the best goes on to the end."""
    attempts = [_Attempt(settings, lr) for lr in settings["learning_rates"]]
    trial = TRIAL * settings["seconds"] / len(attempts) if len(attempts) > 1 else 0.0
    for attempt in attempts if trial else []:
        attempt.train(trial, final=False)
        if attempt.accuracy >= SOLVED:
            return attempt.result()
    best = max(attempts, key=lambda a: a.accuracy)
    best.train(settings["seconds"] - trial * len(attempts), final=True)
    return best.result()


class _Attempt:
    """One model at one learning rate."""

    def __init__(self, settings: dict[str, Any], lr: float):
        self.settings, self.lr = settings, lr
        self.task, self.length = TASKS[settings["task"]](), settings["length"]
        mixer = ARMS[settings["arm"]]
        config = {"width": HEADS * HEAD_DIM, "depth": DEPTH, "vocabulary": self.task.vocabulary, "mixer": mixer}
        self.model = from_dict(Decoder.Config, config).build(seed=settings["seed"]).train()
        self.optimizer = AdamW(self.model, lr=lr, weight_decay=0.0)
        self.generator = np.random.default_rng(settings["seed"])
        self.step, self.seconds, self.loss, self.accuracy = 0, 0.0, math.nan, 0.0

    def train(self, seconds: float, final: bool) -> None:
        """Steps for ``seconds`` or until solved; on the ``final`` leg the last half decays the rate to a tenth."""
        start, spent, next_check = time.perf_counter(), 0.0, 0.1
        while spent < 1 and self.accuracy < SOLVED:
            decay = 1.0 - 1.8 * max(0.0, spent - 0.5) if final else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (self.step + 1) / 50) * decay
            self._one_step()
            spent = (time.perf_counter() - start) / seconds
            if spent >= next_check:
                next_check = spent + 0.05
                self._check(spent)
        if self.accuracy < SOLVED:
            self.accuracy = _accuracy(self.model, self.task, self.length, self.settings["seed"], EVALUATION_ROWS)
        self.seconds += time.perf_counter() - start

    def _one_step(self) -> None:
        rows = max(1, self.settings["batch_tokens"] // self.length)
        batch = _batch(self.task.rows(rows, self.length, self.generator))
        self.optimizer.zero_grad(set_to_none=True)
        assert batch.loss_weights is not None
        loss = self.model(batch, output="loss") / batch.loss_weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.loss = float(loss.detach())

    def _check(self, spent: float) -> None:
        """Accuracy on a few rows; only if they are solved, on all (the number that counts)."""
        measure = lambda rows: _accuracy(self.model, self.task, self.length, self.settings["seed"], rows)
        quick = measure(CHECK_ROWS)
        name = f"{self.settings['task']} {self.length} {self.settings['arm']}"
        _tell(f"{name}, lr {self.lr:g}: {spent:4.0%}, step {self.step}, loss {self.loss:.3f}, accuracy {quick:.3f}")
        if quick >= SOLVED:
            self.accuracy = measure(EVALUATION_ROWS)

    def result(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy, "lr": self.lr, "steps": self.step, "seconds": self.seconds, "loss": self.loss,
            "parameters": count_parameters(self.model)["total"],
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
def _accuracy(model: Decoder, task: Any, length: int, seed: int, rows: int) -> float:
    """Share of right answers in ``rows`` rows that training never draws (another stream of the generator)."""
    generator = np.random.default_rng([seed, 1])
    right = count = 0.0
    model.eval()
    for start in range(0, rows, 64):
        batch = _batch(task.rows(min(64, rows - start), length, generator))
        assert batch.targets is not None and batch.loss_weights is not None
        correct = model(batch, output="logits").argmax(-1) == batch.targets
        right += float((correct * batch.loss_weights).sum())
        count += float(batch.loss_weights.sum())
    model.train()
    return right / count


def _readme(results: list[dict[str, Any]], meta: dict[str, Any]) -> str:
    lengths, arms = _ordered(results, "length"), _ordered(results, "arm")
    lines = ["# Memory tasks", "", f"Accuracy (%) on {meta['n']} fresh rows, better of {len(meta['learning_rates'])} "
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
