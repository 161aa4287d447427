"""Which mixers remember? Palindrome, associative recall and stacks for KDA, GDN, full attention and an LSTM.

The shape of Kimi Linear's section 5.1 (arXiv 2510.26692) scaled to a CPU: 2 layers, 2 heads of 32, short lengths. In a
cell (task, length, mixer) the learning rates compete for the first part of the steps, and the best goes on to their end
or until it answers 99.9 % of fresh questions. All mixers get the same steps and the same rows. Finished cells are kept:
running again resumes.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triscale.config import from_dict
from triscale.data.tasks import TASKS, TaskRows
from triscale.models import count_parameters
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.optim.adamw import AdamW
from triscale.train.interrupt import InterruptGuard

from .page import command_line, defaults, header, pyplot, save_figure, table, write_page

QUESTION = "Which mixers remember palindromes, pairs and stacks?"
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
TRIAL = 0.3  # share of a cell's steps in which its learning rates compete
CHECK_EVERY = 25  # steps


def run(
    output: Path,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = (64, 128),
    arms: Sequence[str] = tuple(ARMS),
    learning_rates: Sequence[float] = (3e-3, 1e-3),
    steps: int = 1000,
    batch_tokens: int = 2048,
    seed: int = 0,
) -> dict[str, Any]:
    """Train every cell for at most ``steps`` and write results.json, README.md and accuracy.svg into ``output``.

    Raises :class:`~triscale.train.interrupt.Interrupted` when stopped; finished cells are not run again.
    """
    settings = {"tasks": list(tasks), "lengths": list(lengths), "arms": list(arms), "steps": steps, "seed": seed,
                "learning_rates": list(learning_rates), "batch_tokens": batch_tokens}  # fmt: skip
    cells = output / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    rows = []
    with InterruptGuard("stopping: finished cells are kept (press again to exit at once)") as guard:
        for task, length, arm in itertools.product(tasks, lengths, arms):
            cell = {"task": task, "length": length, "arm": arm, "learning_rates": list(learning_rates),
                    "steps": steps, "batch_tokens": batch_tokens, "seed": seed}  # fmt: skip
            rows.append(row := _cell(cells / f"{task}-{length}-{arm}.json", cell, guard))
            _tell("")
            print(f"{task:<20} {length:>4} {arm:<10} accuracy {row['accuracy']:.3f}  {row['steps']} steps", flush=True)
    given = {**settings, "tasks": tuple(tasks), "lengths": tuple(lengths), "arms": tuple(arms),
             "learning_rates": tuple(learning_rates)}  # fmt: skip
    result = {
        **header(QUESTION, command_line("memory-tasks", run, given), settings),
        "model": {"depth": DEPTH, "heads": HEADS, "head_dim": HEAD_DIM},
        "evaluation_rows": EVALUATION_ROWS,
        "rows": rows,
    }
    write_page(output, result, _readme(result))
    _figure(rows, output / "accuracy.svg")
    print("\n".join(verdict(rows)))
    return result


def plan(**settings: Any) -> str:
    """What :func:`run` with these settings would cost at most: a cell ends early when its task is solved."""
    chosen = defaults(run) | settings
    cells = math.prod(len(chosen[key]) for key in ("tasks", "lengths", "arms"))
    steps = cells * chosen["steps"]
    return (f"{cells} cells of at most {chosen['steps']:,} steps\n"
            f"together at most {steps:,} steps of {chosen['batch_tokens']:,} tokens")  # fmt: skip


def _cell(path: Path, settings: dict[str, Any], guard: InterruptGuard) -> dict[str, Any]:
    """The cell's result; read back if the same cell was finished before."""
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["settings"] == settings:
            return saved["result"]
    result = {key: settings[key] for key in ("task", "length", "arm")} | _race(settings, guard)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"settings": settings, "result": result}), encoding="utf-8")
    temporary.replace(path)
    return result


def _race(settings: dict[str, Any], guard: InterruptGuard) -> dict[str, Any]:
    """Every learning rate gets an equal share of the first TRIAL of the cell's steps; the best goes on to the end."""
    attempts = [_Attempt(settings, lr, guard) for lr in settings["learning_rates"]]
    trial = math.ceil(TRIAL * settings["steps"] / len(attempts)) if len(attempts) > 1 else 0
    for attempt in attempts if trial else []:
        attempt.train(trial, final=False)
        if attempt.accuracy >= SOLVED:
            return attempt.result()
    best = max(attempts, key=lambda a: (a.accuracy, -a.loss))
    best.train(settings["steps"] - trial * len(attempts), final=True)
    return best.result()


class _Attempt:
    """One model at one learning rate."""

    def __init__(self, settings: dict[str, Any], lr: float, guard: InterruptGuard | None = None):
        self.settings, self.lr, self.guard = settings, lr, guard
        self.task, self.length = TASKS[settings["task"]](), settings["length"]
        mixer = ARMS[settings["arm"]]
        config = {"width": HEADS * HEAD_DIM, "depth": DEPTH, "vocabulary": self.task.vocabulary, "mixer": mixer}
        self.model = from_dict(Decoder.Config, config).build(seed=settings["seed"]).train()
        self.optimizer = AdamW(self.model, lr=lr, weight_decay=0.0)
        self.generator = np.random.default_rng(settings["seed"])
        self.step, self.seconds, self.loss, self.accuracy = 0, 0.0, math.nan, 0.0

    def train(self, steps: int, final: bool) -> None:
        """Take ``steps`` or stop when solved; on the ``final`` leg the last half decays the rate to a tenth."""
        start = time.perf_counter()
        for index in range(steps):
            if self.guard is not None:
                self.guard.check()
            decay = 1.0 - 1.8 * max(0.0, index / steps - 0.5) if final else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (self.step + 1) / 50) * decay
            self._one_step()
            if (index + 1) % CHECK_EVERY == 0 and self._solved(f"{index + 1}/{steps}"):
                break
        if self.accuracy < SOLVED:
            self.accuracy = self._measure(EVALUATION_ROWS)
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

    def _solved(self, place: str) -> bool:
        """Whether a few rows are solved and then all (the number that counts)."""
        quick = self._measure(CHECK_ROWS)
        name = f"{self.settings['task']} {self.length} {self.settings['arm']}"
        _tell(f"{name}, lr {self.lr:g}: step {place}, loss {self.loss:.3f}, accuracy {quick:.3f}")
        if quick >= SOLVED:
            self.accuracy = self._measure(EVALUATION_ROWS)
        return self.accuracy >= SOLVED

    def _measure(self, rows: int) -> float:
        return _accuracy(self.model, self.task, self.length, self.settings["seed"], rows)

    def result(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy, "lr": self.lr, "steps": self.step, "seconds": self.seconds, "loss": self.loss,
            "parameters": count_parameters(self.model)["total"],
        }  # fmt: skip


def _tell(line: str) -> None:
    """Progress: one line rewritten on a terminal, plain lines elsewhere."""
    terminal = sys.stderr.isatty()
    if not line and not terminal:
        return
    print(
        f"\r{line:<100}{'' if line else chr(13)}" if terminal else line,
        end="" if terminal else "\n",
        file=sys.stderr,
        flush=True,
    )


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


def _readme(result: dict[str, Any]) -> str:
    rows, asked, model = result["rows"], result["settings"], result["model"]
    lengths, arms = _ordered(rows, "length"), _ordered(rows, "arm")
    rates = ", ".join(f"{rate:g}" for rate in asked["learning_rates"])
    parameters = "; ".join(f"{arm} {_first(rows, arm)['parameters']:,}" for arm in arms)
    page = [
        f"# {QUESTION}", f"    {result['command']}", "![accuracy by length](accuracy.svg)",
        f"{model['depth']} layers of {model['heads']} heads of {model['head_dim']} (parameters on the first task: "
        f"{parameters}), fresh rows at every step, {asked['batch_tokens']:,} tokens a step and at most {asked['steps']:,} "
        f"steps a cell, the same for all mixers. The learning rates {rates} compete for the first {TRIAL:.0%} of the steps and "
        f"the best goes on; a cell ends early when it is solved ({SOLVED:.1%} right). A number is the share of right answers "
        f"(%) in {result['evaluation_rows']} rows that training never draws, behind it the steps taken where solved.",
    ]  # fmt: skip
    for task in _ordered(rows, "task"):
        found = {(row["length"], row["arm"]): row for row in rows if row["task"] == task}
        lines = [[str(n), *(_cell_text(found[n, arm]) for arm in arms)] for n in lengths]
        page += [f"## {task.capitalize()}", table(["length", *arms], lines)]
    page += ["## Verdict", "\n".join(f"- {line}" for line in verdict(rows)),
             f"One seed a cell ({asked['seed']}): a small gap between two mixers means nothing here, solved against unsolved "
             "does. A cell that is not solved says that so many steps did not suffice, not that the mixer cannot. Everything "
             "measured: [results.json](results.json)."]  # fmt: skip
    return "\n\n".join(page) + "\n"


def _cell_text(row: dict[str, Any]) -> str:
    return f"{100 * row['accuracy']:.1f}" + (f" ({row['steps']})" if row["accuracy"] >= SOLVED else "")


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Sentences that the numbers decide."""
    said = []
    for task in _ordered(rows, "task"):
        parts = []
        for arm in _ordered(rows, "arm"):
            own = [row for row in rows if row["task"] == task and row["arm"] == arm]
            solved = [row["length"] for row in own if row["accuracy"] >= SOLVED]
            last = max(own, key=lambda row: row["length"])
            if not solved:
                parts.append(f"{arm} solves no length ({100 * last['accuracy']:.0f} % at {last['length']})")
            elif len(solved) == len(own):
                parts.append(f"{arm} solves every length")
            else:
                parts.append(
                    f"{arm} solves {', '.join(map(str, solved))} ({100 * last['accuracy']:.0f} % at {last['length']})"
                )
        said.append(f"{task.capitalize()}: {'; '.join(parts)}.")
    return said


def _first(rows: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    return next(row for row in rows if row["arm"] == arm)


def _figure(results: list[dict[str, Any]], path: Path) -> None:
    plt = pyplot()
    tasks, arms = _ordered(results, "task"), _ordered(results, "arm")
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3.2), sharey=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for arm in arms:
            points = [(r["length"], 100 * r["accuracy"]) for r in results if r["task"] == task and r["arm"] == arm]
            axis.plot(*zip(*points, strict=True), marker="o", label=arm)
        axis.set(title=task, xlabel="length (tokens)", xscale="log", ylim=(0, 102))
        axis.set_xticks(_ordered(results, "length"), [str(n) for n in _ordered(results, "length")])
        axis.minorticks_off()
    axes[0][0].set_ylabel("accuracy (%)")
    axes[0][-1].legend(frameon=False)
    figure.tight_layout()
    save_figure(figure, path)


def _ordered(results: list[dict[str, Any]], key: str) -> list:
    return list(dict.fromkeys(r[key] for r in results))
