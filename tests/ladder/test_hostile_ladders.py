"""Ladders under attack: schedules without branches, mistakes in the last arm, stops, stale locks, changed files."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from triscale.config import ConfigError, TriScaleError, from_dict, overlay
from triscale.ladder import locks, run
from triscale.ladder.config import LadderConfig, load_ladder
from triscale.ladder.locks import CellLock
from triscale.ladder.match import match_model
from triscale.ladder.plan import plan_ladder
from triscale.ladder.records import load_record
from triscale.ladder.report import report_json
from triscale.ladder.run import LadderRunner
from triscale.ladder.tune import plan_tuning, tune
from triscale.models.decoder import Decoder
from triscale.train.config import Runtime
from triscale.train.loop import Trainer
from triscale.train.progress import Progress
from triscale.train.run_directory import RunDirectory


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    return Runtime(device="cpu", threads=1, cache=str(tmp_path_factory.mktemp("cache")), checkpoint_seconds=1e9)


@pytest.fixture(scope="module")
def make_ladder(tmp_path_factory):
    texts = tmp_path_factory.mktemp("texts")
    for number in range(20):
        (texts / f"{number:02d}.txt").write_text(" ".join(f"w{(number * 7 + i * i) % 23}" for i in range(300)))

    def make(overrides: dict | None = None) -> LadderConfig:
        tree = {
            "name": "tiny", "seeds": [0],
            "base": {
                "model": {"width": 16, "depth": 1, "mixer": {"kind": "grouped_query_attention", "heads": 2}},
                "data": {"corpus": {"kind": "files", "paths": [str(texts)]}, "vocabulary_size": 290},
                "optimizer": {"kind": "adamw", "lr": 3e-3},
                "schedule": {"kind": "wsd", "warmup_length": 1, "decay": 0.5},
                "train": {"batch_tokens": 64, "row_length": 32, "micro_batch_tokens": 64, "eval_tokens": 64},
            },
            "rungs": [{"name": "one", "tokens": 256, "budgets": [1.0, 2.0]}],
            "arms": [{"name": "baseline"}],
        }  # fmt: skip
        return from_dict(LadderConfig, overlay(tree, overrides or {}))

    return make


def go(ladder, folder, runtime):
    with Progress() as progress:
        return LadderRunner(ladder, folder, runtime).run(progress)


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "cosine", "warmup": 0.0},
        {"kind": "constant", "warmup": 0.25},
        {"kind": "constant", "warmup": 0.0},
        {"kind": "wsd", "warmup": 0.25, "decay": 0.5},
    ],
    ids=["cosine", "constant", "constant-without-warm-up", "wsd-with-relative-warm-up"],
)
def test_every_budget_equals_a_straight_run_whatever_the_schedule(make_ladder, runtime, tmp_path, schedule):
    ladder = make_ladder({"base": {"schedule": schedule}})
    record = go(ladder, tmp_path / "runs", runtime)
    runner = LadderRunner(ladder, tmp_path / "runs", runtime)
    for budget in record.runs[0].budgets:
        config = runner.config(runner.cells()[0], budget.tokens)
        straight = Trainer(config, runtime, tmp_path / str(budget.tokens)).train()
        assert straight["loss"] == budget.loss


def test_a_mistake_in_the_last_arm_is_found_before_anything_is_trained(make_ladder, runtime, tmp_path):
    for config, named in (
        ({"model": {"widht": 3}}, "widht.*Did you mean 'width'"),
        ({"model": {"mixer": {"heads": 3}}}, "heads: 3 does not divide"),
        ({"train": {"batch_tokens": "many"}}, "batch_tokens"),
    ):
        ladder = make_ladder({"arms": [{"name": "baseline"}, {"name": "last", "config": config}]})
        with pytest.raises(ConfigError, match=named):
            go(ladder, tmp_path / "runs", runtime)
    assert not (tmp_path / "runs" / "one").exists()


def test_arms_and_seeds_may_be_added_and_other_changes_are_named(make_ladder, runtime, tmp_path):
    go(make_ladder(), tmp_path, runtime)
    before = (tmp_path / "one/baseline/seed0/tokens512/events.jsonl").stat()
    more = {"seeds": [0, 1], "arms": [{"name": "baseline"}, {"name": "residual", "config": {"model": {"depth": 2}}}]}
    record = go(make_ladder(more | {"rungs": [{"name": "one", "tokens": 256, "budgets": [1.0, 2.0], "match": "none"}]}),
                tmp_path, runtime)  # fmt: skip
    assert len(record.runs) == 4
    assert (tmp_path / "one/baseline/seed0/tokens512/events.jsonl").stat().st_mtime_ns == before.st_mtime_ns
    assert report_json(record)["arms"]["residual"]["verdict"] in ("better", "worse", "no difference detected")
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.003 -> 0\.1"):
        go(make_ladder({"base": {"optimizer": {"lr": 0.1}}}), tmp_path, runtime)


def test_what_is_finished_can_be_reported_after_a_stop(make_ladder, runtime, tmp_path, monkeypatch):
    ladder, real = make_ladder({"seeds": [0, 1]}), LadderRunner._run_cell

    def stop_between_cells(self, cell, *rest):
        if cell.seed == 1:
            raise KeyboardInterrupt
        real(self, cell, *rest)

    monkeypatch.setattr(LadderRunner, "_run_cell", stop_between_cells)
    with pytest.raises(KeyboardInterrupt):
        go(ladder, tmp_path, runtime)
    partial = load_record(tmp_path)
    assert len(partial.runs) == 1 and partial.seeds == (0, 1)
    assert report_json(partial)["baseline"]["rungs"][0]["runs"] == 1
    assert not list(tmp_path.rglob("seed*/.lock"))
    monkeypatch.setattr(LadderRunner, "_run_cell", real)
    assert len(go(ladder, tmp_path, runtime).runs) == 2


def test_the_machine_that_began_a_ladder_decides_its_precision(make_ladder, runtime, tmp_path, monkeypatch):
    real, beginner = run.resolve_precision, {"auto": "fp32"}
    monkeypatch.setattr(run, "resolve_precision", lambda name, device: real(beginner.get(name, name), device))
    go(make_ladder(), tmp_path, runtime)
    beginner["auto"] = "bf16"  # the folder moves to a machine with fast bf16
    go(make_ladder({"seeds": [0, 1]}), tmp_path, runtime)
    used = {RunDirectory(p.parent).read_config()["train"]["precision"] for p in tmp_path.rglob("config.toml")}
    assert used == {"fp32"}


def test_a_run_that_is_busy_is_left_to_its_owner(make_ladder, runtime, tmp_path):
    folder = RunDirectory(tmp_path / "one/baseline/seed0/tokens512")
    with folder.exclusive():
        assert go(make_ladder(), tmp_path, runtime).runs == ()
    assert len(go(make_ladder(), tmp_path, runtime).runs) == 1


def test_locks_of_the_dead_are_taken_and_those_of_others_stay(tmp_path):
    lock = CellLock(tmp_path)
    old = time.time() - locks.STALE_SECONDS - 1
    for left in ("{", "", json.dumps({"host": os.uname().nodename, "pid": 1})):  # torn, empty, a reused process id
        lock.path.write_text(left)
        assert not CellLock(tmp_path).acquire()
        os.utime(lock.path, (old, old))
        assert CellLock(tmp_path).acquire()
        lock.path.unlink()
    assert lock.acquire()
    lock.path.write_text(json.dumps({"host": "elsewhere", "pid": 2}))  # taken over while we slept
    lock.release()
    assert lock.path.exists()


def test_a_diverged_run_is_remembered_with_its_config(make_ladder, runtime, tmp_path):
    runner = LadderRunner(make_ladder(), tmp_path, runtime)
    cell = runner.cells()[0]
    trainer = runner.trainer(cell, tmp_path / "run", 256, (), ())
    trainer.directory.open(trainer.config, runtime)
    (tmp_path / "run" / "diverged.json").write_text(json.dumps({"outcome": "diverged"}))
    assert runner.train(trainer) == {"outcome": "diverged"}
    changed = LadderRunner(make_ladder({"base": {"optimizer": {"lr": 1e-4}}}), tmp_path, runtime)
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        changed.train(changed.trainer(cell, tmp_path / "run", 256, (), ()))


def test_matching_gives_up_on_a_width_that_changes_nothing():
    base = from_dict(Decoder.Config, {"width": 16, "depth": 2, "vocabulary": 64})
    unused = replace(base, first_dense=2, dense_feed_forward=replace(base.dense_feed_forward, hidden=8))
    with pytest.raises(ConfigError, match="does not change the parameters"):
        match_model(unused, base, "parameters", 32)


def test_tuning_refuses_unknown_arms_and_hopeless_grids(make_ladder, runtime, tmp_path, monkeypatch):
    with Progress() as progress:
        with pytest.raises(ConfigError, match="'basline' is not in the ladder"):
            tune(make_ladder(), tmp_path, runtime, progress, ("basline",))
        monkeypatch.setattr(LadderRunner, "train", staticmethod(lambda trainer: {"loss": None}))
        with pytest.raises(TriScaleError, match="diverged at every rate"):
            tune(make_ladder(), tmp_path, runtime, progress)
    for values in (
        {"rates": []},
        {"rates": [-1.0]},
        {"tune_fraction": 0.0},
        {"seeds": []},
        {"arms": []},
        {"runtime": {}},
    ):
        with pytest.raises(ConfigError, match=next(iter(values))):
            from_dict(
                LadderConfig, {"name": "x", "rungs": [{"name": "r", "tokens": 1}], "arms": [{"name": "a"}]} | values
            )


def test_plans_say_memory_and_train_nothing(make_ladder, runtime, tmp_path):
    runner = LadderRunner(make_ladder(), tmp_path / "runs", runtime)
    lines = plan_ladder(runner).lines()
    assert "memory" in lines[0] and "GiB" in lines[1]
    planned = plan_tuning(runner)
    assert planned.seeds == 4 and planned.rows[0].tokens == 256 and "4 rate(s)" in planned.lines()[-1]
    assert not (tmp_path / "runs").exists()


def test_a_folder_named_like_a_shipped_ladder_is_not_mistaken_for_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_ladder("demo").name == "demo"
