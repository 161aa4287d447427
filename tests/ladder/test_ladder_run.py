"""Running ladders: matched arms, branches, resumption, locks, sharing."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from triscale.config import ConfigError, from_dict, overlay
from triscale.ladder.config import LadderConfig, load_ladder, shipped_ladders
from triscale.ladder.locks import CellLock
from triscale.ladder.match import match_model, measure
from triscale.ladder.plan import plan_ladder
from triscale.ladder.records import load_record
from triscale.ladder.report import report_json
from triscale.ladder.run import LadderRunner, branch_from
from triscale.ladder.tune import tune, with_rates
from triscale.models.decoder import Decoder
from triscale.train.checkpoint import complete_checkpoints
from triscale.train.config import Runtime
from triscale.train.interrupt import Interrupted
from triscale.train.loop import Trainer
from triscale.train.progress import Progress


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        words = [f"w{(number * 7 + i * i) % 23}" for i in range(300)]
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    return Runtime(device="cpu", threads=1, cache=str(tmp_path_factory.mktemp("cache")), checkpoint_seconds=1e9)


@pytest.fixture
def make_ladder(corpus):
    def make(overrides: dict | None = None) -> LadderConfig:
        tree = {
            "name": "test",
            "seeds": [0, 1],
            "base": {
                "model": {"width": 16, "depth": 2, "mixer": {"kind": "grouped_query_attention", "heads": 2}},
                "data": {"corpus": {"kind": "files", "paths": [str(corpus)]}, "vocabulary_size": 300},
                "optimizer": {"kind": "adamw", "lr": 3e-3},
                "schedule": {"kind": "wsd", "warmup_length": 2, "decay": 0.25},
                "train": {"batch_tokens": 128, "row_length": 32, "micro_batch_tokens": 128, "precision": "fp32",
                          "eval_tokens": 256},
            },
            "rungs": [{"name": "one", "tokens": 1024, "budgets": [0.5, 1.0, 2.0]}],
            "arms": [{"name": "baseline"}, {"name": "residual", "config": {"model": {"residual": "attention"}}}],
        }  # fmt: skip
        return from_dict(LadderConfig, overlay(tree, overrides or {}))

    return make


def weights(path):
    return load_file(complete_checkpoints(path / "checkpoints")[-1][1] / "model.safetensors")


def test_ladder_runs_reports_and_is_a_no_op_the_second_time(make_ladder, runtime, tmp_path):
    runner = LadderRunner(make_ladder(), tmp_path / "runs", runtime)
    with Progress() as progress:
        record = runner.run(progress)
        before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("events.jsonl")}
        again = LadderRunner(make_ladder(), tmp_path / "runs", runtime).run(progress)
    assert len(record.runs) == 4 and again.runs == record.runs
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("events.jsonl")}
    report = report_json(load_record(tmp_path / "runs"))
    row = report["arms"]["residual"]["rungs"][0]
    assert {"params", "tokens", "loss_mean", "loss_diff", "ci", "multiplier", "multiplier_ci"} <= row.keys()
    base = next(run for run in record.runs if run.arm == "baseline")
    assert [b.tokens for b in base.budgets] == [512, 1024, 2048]
    assert base.budgets[0].loss > base.budgets[2].loss


def test_branch_equals_a_straight_run_of_its_budget(make_ladder, runtime, tmp_path):
    runner = LadderRunner(make_ladder(), tmp_path / "runs", runtime)
    cell = runner.cells()[0]
    with Progress() as progress:
        runner._run_cell(cell, tmp_path / "cell", progress, CellLock(tmp_path / "cell"))
    straight = Trainer(runner.config(cell, 1024), runtime, tmp_path / "straight").train()
    branched = json.loads((tmp_path / "cell" / "tokens1024" / "result.json").read_text())
    assert branched["loss"] == straight["loss"]
    a, b = weights(tmp_path / "straight"), weights(tmp_path / "cell" / "tokens1024")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_pairs_share_start_and_data(make_ladder, runtime, tmp_path):
    """Same rung and seed: equal weights where shapes agree, and the same rows in the same order."""
    runner = LadderRunner(make_ladder(), tmp_path, runtime)
    base, arm = runner.cells()[:2]
    first = runner.config(base).model.build(seed=base.seed).state_dict()
    second = runner.config(arm).model.build(seed=arm.seed).state_dict()
    shared = [n for n in first if n in second and first[n].shape == second[n].shape]
    assert "embedding.weight" in shared and "layers.0.mixer.q_proj.weight" in shared
    assert all(torch.equal(first[n], second[n]) for n in shared)
    assert runner.config(base).seed == runner.config(arm).seed
    assert runner.config(base).data == runner.config(arm).data


def test_interrupted_ladder_resumes(make_ladder, runtime, tmp_path):
    ladder = make_ladder({"seeds": [0]})
    whole = LadderRunner(ladder, tmp_path / "whole", runtime)
    stopped = LadderRunner(ladder, tmp_path / "stopped", runtime)
    with Progress() as progress:
        expected = whole.run(progress)
        original, count = Trainer._one_step, 0

        def step_then_stop(trainer):
            nonlocal count
            original(trainer)
            count += 1
            if count == 10:
                trainer.guard.requested = True

        Trainer._one_step = step_then_stop
        try:
            with pytest.raises(Interrupted):
                stopped.run(progress)
        finally:
            Trainer._one_step = original
        record = stopped.run(progress)
    assert [r.loss for r in record.runs] == [r.loss for r in expected.runs]


def test_another_config_in_the_same_folder_is_refused(make_ladder, runtime, tmp_path):
    with Progress() as progress:
        LadderRunner(make_ladder({"seeds": [0]}), tmp_path, runtime).run(progress)
        changed = make_ladder({"seeds": [0], "base": {"train": {"row_length": 64}}})
        with pytest.raises(ConfigError, match="another config"):
            LadderRunner(changed, tmp_path, runtime).run(progress)


def test_shards_share_the_work(make_ladder, runtime, tmp_path):
    with Progress() as progress:
        first = LadderRunner(make_ladder(), tmp_path, runtime).run(progress, (0, 2))
        assert len(first.runs) == 2
        assert len(LadderRunner(make_ladder(), tmp_path, runtime).run(progress, (1, 2)).runs) == 4


def test_locks_keep_others_out_and_outlive_no_process(tmp_path):
    lock = CellLock(tmp_path / "cell")
    assert lock.acquire()
    lock.path.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    assert not CellLock(tmp_path / "cell").acquire()
    lock.path.write_text(json.dumps({"host": os.uname().nodename, "pid": 2**22 + 1}))
    assert CellLock(tmp_path / "cell").acquire()


def test_branch_copies_a_checkpoint_once(make_ladder, runtime, tmp_path):
    runner = LadderRunner(make_ladder(), tmp_path / "runs", runtime)
    cell = runner.cells()[0]
    trunk = Trainer(runner.config(cell, 1024), runtime, tmp_path / "trunk", keep_steps=(3,))
    trunk.train()
    branch_from(trunk.directory, 3, tmp_path / "branch")
    assert complete_checkpoints(tmp_path / "branch" / "checkpoints")[-1][0] == 3
    branch_from(trunk.directory, 3, tmp_path / "branch")


@pytest.mark.parametrize("match", ["parameters", "active", "flops"])
def test_matching_makes_arms_comparable(match):
    base = from_dict(Decoder.Config, {"width": 64, "depth": 4, "vocabulary": 512})
    arm = from_dict(Decoder.Config, {"width": 64, "depth": 4, "vocabulary": 512, "mixer": {"kind": "latent_attention"}})
    matched = match_model(arm, base, match, 128)
    assert abs(matched.mismatch) < 0.02
    ratio = measure(matched.model, match, 128) / measure(base, match, 128)
    assert ratio - 1 == pytest.approx(matched.mismatch)
    assert match_model(arm, base, "none", 128).model is arm
    huge = from_dict(Decoder.Config, {"width": 512, "depth": 8, "vocabulary": 512})
    with pytest.raises(ConfigError, match="cannot be matched"):
        match_model(huge, base, match, 128)


def test_tuning_extends_the_grid_and_finds_the_inside(make_ladder, runtime, tmp_path):
    ladder = make_ladder({"rates": [1e-5, 3e-5], "seeds": [0]})
    with Progress() as progress:
        record = tune(ladder, tmp_path, runtime, progress, ("baseline",))
    row = record["rungs"]["one"]["arms"]["baseline"]
    assert max(float(rate) for rate in row["losses"]) > 1e-4
    tuned = with_rates(ladder, record)
    assert tuned.baseline.rate("one") == row["best"]
    assert tuned.arms[1].rate("one") is None


def test_plan_counts_without_training(make_ladder, runtime, tmp_path):
    plan = plan_ladder(LadderRunner(make_ladder(), tmp_path / "none", runtime))
    assert [row.arm for row in plan.rows] == ["baseline", "residual"]
    assert plan.minutes > 0 and all(row.parameters > 0 for row in plan.rows)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", shipped_ladders())
def test_shipped_ladders_resolve(name):
    ladder = load_ladder(name)
    for rung in ladder.rungs:
        for arm in ladder.arms:
            ladder.run_config(rung, arm, ladder.seeds[0])


def test_unknown_ladder_lists_the_known_ones():
    with pytest.raises(ConfigError, match="demo"):
        load_ladder("demmo")


def test_every_run_of_a_ladder_is_tracked(make_ladder, runtime, tmp_path, monkeypatch):
    from triscale.train import trackers

    seen: dict[str, set[int]] = {}

    class Recorder:
        name = "recorder"

        def __init__(self, run_dir):
            self.steps = seen.setdefault(str(run_dir.relative_to(tmp_path)), set())

        def start(self, run, config):
            pass

        def log(self, step, values):
            self.steps.add(step)

        def finish(self, summary):
            pass

    monkeypatch.setitem(trackers.TRACKERS, "recorder", Recorder)
    ladder = make_ladder({"seeds": [0], "rungs": [{"name": "one", "tokens": 512, "budgets": [0.5, 1.0]}]})
    with Progress() as progress:
        LadderRunner(ladder, tmp_path, replace(runtime, track=("recorder",))).run(progress)
    assert seen.keys() == {
        "one/baseline/seed0/tokens512",
        "one/baseline/seed0/tokens256",
        "one/residual/seed0/tokens512",
    }
    assert seen["one/baseline/seed0/tokens512"] >= {1, 2, 3, 4}
