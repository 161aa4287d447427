"""Running a ladder: every cell (arm, rung, seed) once, resumable, shared between processes."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from triscale.config import ConfigError, overlay, to_dict
from triscale.data.prepare import PreparedData, prepare
from triscale.train.checkpoint import MARKER, checkpoint_path
from triscale.train.config import RunConfig, Runtime, describe_difference, resolved
from triscale.train.device import resolve_device, resolve_precision
from triscale.train.divergence import DivergedError
from triscale.train.loop import Trainer
from triscale.train.progress import Progress
from triscale.train.run_directory import RunBusyError, RunDirectory, environment, write_json
from triscale.train.trackers import tracking

from .config import ArmConfig, LadderConfig, RungConfig
from .locks import CellLock
from .match import Matched, match_model
from .records import Budget, LadderRecord, Rung, RunSummary, collect_runs, load_record, load_run, with_event_curves


@dataclass(frozen=True)
class Cell:
    """One measurement: an arm at a rung with a seed. budgets: token budgets, the rung's own included."""

    rung: RungConfig
    arm: ArmConfig
    seed: int
    budgets: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.rung.name}/{self.arm.name}/seed{self.seed}"


class LadderRunner:
    """Plans and runs the cells of one ladder below ``folder``."""

    def __init__(self, ladder: LadderConfig, folder: Path, runtime: Runtime):
        self.ladder, self.folder, self.runtime = ladder, Path(folder), runtime
        self._matched: dict[tuple[str, str], Matched] = {}
        self._data: dict[str, PreparedData] = {}
        self.preparing: Callable[[str, int, int], None] | None = None  # told how data preparation goes

    def cells(self) -> list[Cell]:
        """In the order they run: small rungs first, seed by seed, so that every early stop leaves whole pairs."""
        cells = []
        for rung in self.ladder.rungs:
            for seed in self.ladder.seeds:
                for arm in self.ladder.arms:
                    many = arm.name == self.ladder.baseline.name
                    budgets = [round(rung.tokens * b) for b in (sorted(rung.budgets) if many else (1.0,))]
                    cells.append(Cell(rung, arm, seed, tuple(budgets)))
        return cells

    def config(self, cell: Cell, tokens: int | None = None) -> RunConfig:
        """The cell's run config, its model matched to the baseline of the rung."""
        config = self.ladder.run_config(cell.rung, cell.arm, cell.seed, tokens)
        return replace(config, model=self.matched(cell.rung, cell.arm).model)

    def matched(self, rung: RungConfig, arm: ArmConfig) -> Matched:
        key = rung.name, arm.name
        if key not in self._matched:
            size = self.data(rung, arm).tokenizer.vocabulary_size
            config = self.ladder.run_config(rung, arm, 0)
            base = self.ladder.run_config(rung, self.ladder.baseline, 0).model
            model, base = replace(config.model, vocabulary=size), replace(base, vocabulary=size)
            self._matched[key] = match_model(model, base, rung.match, config.train.row_length)
        return self._matched[key]

    def data(self, rung: RungConfig, arm: ArmConfig) -> PreparedData:
        config = self.ladder.run_config(rung, arm, 0).data
        key = json.dumps(to_dict(config), sort_keys=True)
        if key not in self._data:
            self._data[key] = prepare(config, self.runtime.cache_dir, self.preparing)
        return self._data[key]

    def run(self, progress: Progress, shard: tuple[int, int] = (0, 1)) -> LadderRecord:
        """Run what is missing and return the record of everything finished.

        shard (i, n): only every n-th cell, starting at i; several processes may share the folder. Raises
        :class:`~triscale.train.interrupt.Interrupted` when stopped, with everything resumable.
        """
        self.preparing = progress.preparing
        cells = self.cells()
        self._check(cells)
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = {"ladder": to_dict(self.ladder), "environment": environment(), "precision": self.precision}
        write_json(self.folder / "ladder.json", plan)
        for index, cell in enumerate(cells):
            folder = self.folder / cell.name
            if index % shard[1] != shard[0] or self._finished(cell):
                continue
            lock = CellLock(folder)
            if not lock.acquire():
                progress.note(f"{cell.name}: another process is running it")
                continue
            try:
                progress.title = f"[{index + 1}/{len(cells)}] {cell.name}"
                self._run_cell(cell, folder, progress, lock)
            except RunBusyError as busy:
                progress.note(f"{cell.name}: {busy}")
            finally:
                lock.release()
            self.record().save(self.folder)  # a report is possible while the ladder runs, and after it was stopped
        record = self.record()
        record.save(self.folder)
        return record

    @cached_property
    def precision(self) -> str:
        """What ``train.precision = "auto"`` means in this folder: decided by the machine that began it, because runs in
        different precisions are no pairs."""
        file = self.folder / "ladder.json"
        if file.exists():
            with suppress(ValueError):
                known = json.loads(file.read_text(encoding="utf-8")).get("precision")
                if known in ("bf16", "fp32"):
                    return known
        return "fp32" if resolve_precision("auto", resolve_device(self.runtime.device)) == torch.float32 else "bf16"

    def _check(self, cells: list[Cell]) -> None:
        """Build every arm of every rung on the meta device: a mistake in the last one must not wait for the others."""
        for cell in {(c.rung.name, c.arm.name): c for c in cells}.values():
            try:
                self.config(cell).model.build(seed=None, device="meta")
            except ValueError as error:
                raise ConfigError(f"{cell.arm.name}/{cell.rung.name}.model", str(error)) from error

    def _finished(self, cell: Cell) -> bool:
        """Done, and of this very config; a summary of an older config is an error, not a result."""
        path = self.folder / cell.name / "summary.json"
        if not path.exists():
            return False
        done = load_run(path)
        if done.config_hash != self._hash(cell):
            raise ConfigError(
                str(path.parent),
                "was measured with another config" + self._difference(cell),
                "Use another run folder, or delete this one",
            )
        return True

    def _difference(self, cell: Cell) -> str:
        """What changed since the cell was measured, as lines for a message."""
        kept = RunDirectory(self.folder / cell.name / f"tokens{cell.rung.tokens}")
        if not (kept.path / "config.toml").exists():
            return f" (of another budget than {cell.rung.tokens:,} tokens)"
        now = overlay(resolved(self.config(cell)), {"train": {"precision": kept.read_config()["train"]["precision"]}})
        lines = describe_difference(kept.read_config(), now) or [f"budgets: now {list(cell.budgets)}"]
        return ":\n  " + "\n  ".join(lines) + "\n"

    def _run_cell(self, cell: Cell, folder: Path, progress: Progress, lock: CellLock) -> None:
        """Train the longest budget as the trunk, then the shorter ones as decay branches of it."""

        def alive(event: dict[str, Any]) -> None:
            if event["kind"] in ("step", "eval"):
                lock.touch()

        listeners = (progress, alive)
        longest = max(cell.budgets)
        branches = [b for b in cell.budgets if b != longest]
        trunk = self.trainer(cell, folder / f"tokens{longest}", longest, listeners, branches)
        results: dict[int, dict[str, Any]] = {longest: self.train(trunk)}
        for tokens in branches:
            path = folder / f"tokens{tokens}"
            trainer = self.trainer(cell, path, tokens, listeners, ())
            shared = results[longest]["outcome"] == "completed" and self.branch_step(cell, tokens)
            if shared and not RunDirectory(path).finished:
                branch_from(trunk.directory, self.branch_step(cell, tokens), path)
            progress.title = progress.title.split(" branch")[0] + f" branch at {tokens:,} tokens"
            results[tokens] = self.train(trainer)
        summary = self._summarise(cell, folder, results)
        summary.save(folder / "summary.json")
        for path in folder.glob("tokens*/checkpoints/step_*"):
            if path.parent.parent.name != f"tokens{cell.rung.tokens}":
                shutil.rmtree(path)  # branch points have served; the rung's own final weights stay

    def trainer(
        self, cell: Cell, path: Path, tokens: int, listeners: tuple[Callable, ...], branches: list[int] | tuple
    ) -> Trainer:
        """A trainer of the cell's run of ``tokens`` in ``path``, in the folder's precision, keeping the checkpoints at
        which the runs of ``branches`` tokens part from it."""
        steps = tuple(self.branch_step(cell, b) for b in branches)
        config = self.config(cell, tokens)
        if config.train.precision == "auto":
            config = replace(config, train=replace(config.train, precision=self.precision))  # type: ignore[arg-type]
        return Trainer(
            config, replace(self.runtime, keep=1), path,
            listeners=listeners, prepared=self.data(cell.rung, cell.arm), keep_steps=steps,
        )  # fmt: skip

    def branch_step(self, cell: Cell, tokens: int) -> int:
        """How many steps a run of ``tokens`` shares with the trunk: those before their learning rates part, which for
        a WSD schedule with an absolute warm-up is where its decay starts, and for a cosine is none."""
        trunk, own = self.config(cell, max(cell.budgets)), self.config(cell, tokens)
        rate, own_rate = trunk.schedule.build(trunk.train.steps), own.schedule.build(own.train.steps)
        for step in range(own.train.steps):
            if not math.isclose(rate(step + 0.5), own_rate(step + 0.5), rel_tol=1e-9):
                return step
        return own.train.steps

    @staticmethod
    def train(trainer: Trainer) -> dict[str, Any]:
        """The result, or what is known of a run that diverged: a fact about the arm, not a failure of the ladder."""
        marker = trainer.directory.path / "diverged.json"
        if marker.exists():
            trainer.directory.verify(trainer.config)
            return json.loads(marker.read_text())
        try:
            with tracking(trainer.directory.path, trainer.runtime.track):
                return trainer.train()
        except DivergedError as error:
            result = trainer.partial_result() | {
                "outcome": "diverged", "diverged_at": error.step, "message": str(error),
            }  # fmt: skip
            write_json(marker, result)
            return result

    def _summarise(self, cell: Cell, folder: Path, results: dict[int, dict[str, Any]]) -> RunSummary:
        own = results[cell.rung.tokens]
        config = self.config(cell)
        versions = environment()
        budgets = [
            Budget(tokens=r["tokens"], flops=r["flops"], seconds=r["seconds"], loss=r["loss"])
            for _, r in sorted(results.items())
        ]
        summary = RunSummary(
            arm=cell.arm.name, rung=cell.rung.name, seed=cell.seed,
            parameters=own["parameters"]["total"], parameters_nonembedding=own["parameters"]["non_embedding"],
            parameters_active=own["parameters"]["active"], tokens=own["tokens"], flops=own["flops"],
            seconds=own["seconds"], loss=own["loss"], bits_per_byte=own["bits_per_byte"],
            curve=tuple((float(t), float(v)) for t, v in own["curve"]), budgets=tuple(budgets),
            diverged=own["outcome"] == "diverged", spikes=own["spikes"], max_logit=own["max_logit"],
            corpus_hash=own["corpus"], python=versions["python"], packages=versions["packages"],
            config_hash=self._hash(cell), learning_rate=config.optimizer.lr,
        )  # fmt: skip
        return with_event_curves(summary, folder / f"tokens{cell.rung.tokens}")

    def _hash(self, cell: Cell) -> str:
        tree = [to_dict(self.config(cell)), list(cell.budgets)]
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]

    def record(self) -> LadderRecord:
        """Everything finished so far, with the ladder as planned."""
        names = {(c.arm.name, c.rung.name, c.seed) for c in self.cells()}
        return LadderRecord(
            name=self.ladder.name,
            baseline=self.ladder.baseline.name,
            arms=tuple(a.name for a in self.ladder.arms[1:]),
            rungs=tuple(Rung(name=r.name, tokens=r.tokens, match=r.match) for r in self.ladder.rungs),
            seeds=self.ladder.seeds,
            runs=tuple(run for run in collect_runs(self.folder) if run.key in names),
            ladder=to_dict(self.ladder),
            environment=environment(),
        )


def best_cell(folder: Path) -> Path | None:
    """The cell of a ladder's run folder with the lowest held-out loss; None if ``folder`` is no ladder's."""
    if not (folder / "ladder.json").exists() or not (folder / "summary.json").exists():
        return None
    runs = [run for run in load_record(folder).runs if run.loss is not None]
    kept = [run for run in runs if (folder / run.rung / run.arm / f"seed{run.seed}").exists()]
    best = min(kept, key=lambda run: run.loss or 0.0, default=None)
    return folder / best.rung / best.arm / f"seed{best.seed}" if best else None


def branch_from(trunk: RunDirectory, step: int, path: Path) -> None:
    """Let a new run start from the trunk's checkpoint of ``step``; does nothing if it already did, or if the trunk kept
    no such checkpoint (the new run then trains those steps itself, to the same result)."""
    target = checkpoint_path(RunDirectory(path).checkpoints, step)
    if target.parent.exists() and any(target.parent.glob("step_*")):
        return
    source = checkpoint_path(trunk.checkpoints, step)
    if not (source / MARKER).exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp_{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    temporary.rename(target)
