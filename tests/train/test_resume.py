"""Stopping anywhere changes nothing: resumed = straight, bitwise on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from triscale.config import ConfigError, dump_toml, from_dict
from triscale.events import current_events
from triscale.train.checkpoint import CheckpointError, complete_checkpoints, remove_unfinished, save_checkpoint
from triscale.train.config import RunConfig, Settings, resolved
from triscale.train.interrupt import Interrupted
from triscale.train.loop import Trainer
from triscale.train.run_directory import RunDirectory
from triscale.train.start import decay_start, extend_run, find_weights, start_run

KIMI = {
    "optimizer": {"kind": "muonclip"},
    "model": {
        "mixer": {"kind": "latent_attention", "heads": 2},
        "residual": {"kind": "block_attention", "block": 2},
    },
}


def final_weights(path):
    return load_file(complete_checkpoints(path / "checkpoints")[-1][1] / "model.safetensors")


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("overrides", [{}, KIMI], ids=["baseline", "kimi"])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_interrupted_and_resumed_equals_straight(make_config, runtime, tmp_path, overrides, stop):
    config = make_config(overrides)
    straight = Trainer(config, runtime, tmp_path / "straight").train()

    trainer = Trainer(config, runtime, tmp_path / "stopped")

    def interrupt(event):
        if event["kind"] == "step" and event["data"]["step"] == stop:
            trainer.guard.requested = True

    trainer.listeners = (interrupt,)
    with pytest.raises(Interrupted):
        trainer.train()
    assert complete_checkpoints(tmp_path / "stopped" / "checkpoints")[-1][0] == stop
    resumed = Trainer(config, runtime, tmp_path / "stopped").train()

    assert_same_weights(final_weights(tmp_path / "straight"), final_weights(tmp_path / "stopped"))
    assert resumed["loss"] == straight["loss"]
    assert resumed["curve"] == straight["curve"]
    steps = [e for e in current_events(tmp_path / "stopped" / "events.jsonl") if e.kind == "step"]
    lossless = [e for e in current_events(tmp_path / "straight" / "events.jsonl") if e.kind == "step"]
    assert [(e.data["step"], e.data["loss"]) for e in steps] == [(e.data["step"], e.data["loss"]) for e in lossless]


def command(config, runtime, path, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(resolved(config)))
    return [
        sys.executable, "-m", "triscale", "train", str(file), "--run", str(path), "--runtime.threads=1",
        f"--runtime.cache={runtime.cache}", "--runtime.checkpoint_every=2", "--runtime.device=cpu",
    ]  # fmt: skip


def start_and_signal(arguments, path, number, after_step):
    process = subprocess.Popen(arguments, env={**os.environ, "COLUMNS": "200"}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        found = complete_checkpoints(path / "checkpoints")
        if found and found[-1][0] >= after_step:
            process.send_signal(number)
            break
        time.sleep(0.005)
    return process, process.communicate(timeout=120)[1]


def test_killed_process_resumes_to_the_same_weights(make_config, runtime, tmp_path):
    config = make_config({"train": {"tokens": 40 * 256}})
    Trainer(config, replace(runtime, checkpoint_every=2), tmp_path / "straight").train()
    arguments = command(config, runtime, tmp_path / "killed", tmp_path)
    process, _ = start_and_signal(arguments, tmp_path / "killed", signal.SIGKILL, 6)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists()
    subprocess.run(arguments, check=True, capture_output=True)
    assert_same_weights(final_weights(tmp_path / "straight"), final_weights(tmp_path / "killed"))


def test_ctrl_c_is_acknowledged_and_saves_the_last_step(make_config, runtime, tmp_path):
    config = make_config({"train": {"tokens": 400 * 256}})
    arguments = command(config, runtime, tmp_path / "run", tmp_path)
    process, text = start_and_signal(arguments, tmp_path / "run", signal.SIGINT, 2)
    assert process.returncode == 130
    assert "stopping" in text and "resumes" in text
    end = [e for e in current_events(tmp_path / "run" / "events.jsonl") if e.kind == "run.end"][-1]
    assert end.data["outcome"] == "interrupted"
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")[-1][0] == end.data["step"]


def test_finished_run_is_a_no_op_and_another_config_is_refused(make_config, runtime, tmp_path):
    first = Trainer(make_config(), runtime, tmp_path / "run").train()
    size = (tmp_path / "run" / "events.jsonl").stat().st_size
    assert Trainer(make_config(), runtime, tmp_path / "run").train() == first
    assert (tmp_path / "run" / "events.jsonl").stat().st_size == size
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.003 -> 0\.001"):
        Trainer(make_config({"optimizer": {"lr": 1e-3}}), runtime, tmp_path / "run").train()


def step_losses(path):
    return [(e.data["step"], e.data["loss"]) for e in current_events(path / "events.jsonl") if e.kind == "step"]


def test_an_extended_run_goes_back_to_before_its_decay(make_config, runtime, tmp_path):
    """The warm-up has an absolute length here, so the longer run shares the whole trunk and must equal a straight one."""
    settings = Settings(config=make_config(), runtime=runtime)
    path, trunk = tmp_path / "run", decay_start(settings.config)
    start_run(settings, path)
    assert [step for step, _ in complete_checkpoints(path / "checkpoints")] == [trunk, 8] == [6, 8]
    finished = final_weights(path)
    longer = make_config({"train": {"tokens": 12 * 256}})
    assert start_run(Settings(config=longer, runtime=runtime), path, extend=True)["steps"] == 12
    straight = Trainer(longer, runtime, tmp_path / "straight")
    straight.train()
    assert_same_weights(final_weights(path), final_weights(tmp_path / "straight"))
    assert step_losses(path) == step_losses(tmp_path / "straight")
    moved = path / "checkpoints" / "before_extension" / "step_00000008"
    assert_same_weights(load_file(find_weights(moved) / "model.safetensors"), finished)
    with pytest.raises(ConfigError, match="not more than"):
        extend_run(RunDirectory(path), make_config())


def test_a_decayed_run_without_its_trunk_is_not_extended(make_config, runtime, tmp_path):
    path = tmp_path / "run"
    result = Trainer(make_config(), runtime, path).train()
    with pytest.raises(ConfigError, match=r"decay, after step 6 \(only of step 8\).*--init-from"):
        extend_run(RunDirectory(path), make_config({"train": {"tokens": 12 * 256}}))
    assert RunDirectory(path).result() == result and Trainer(make_config(), runtime, path).train() == result


def test_a_run_that_has_not_decayed_is_extended_where_it_is(make_config, runtime, tmp_path):
    path = tmp_path / "run"
    for schedule in ({"kind": "cosine"}, {"kind": "wsd", "decay": 0.0}):
        config, longer = (make_config({"schedule": schedule, "train": {"tokens": n * 256}}) for n in (4, 6))
        Trainer(config, runtime, path / schedule["kind"]).train()
        extend_run(RunDirectory(path / schedule["kind"]), longer)
        Trainer(longer, runtime, path / schedule["kind"]).train()
        resumed = [e for e in current_events(path / schedule["kind"] / "events.jsonl") if e.kind == "run.resume"]
        assert [(e.data["step"], e.data["steps"]) for e in resumed] == [(4, 6)]


def test_unfinished_checkpoints_are_ignored_and_removed(tmp_path):
    for step in (99, 100):
        save_checkpoint(tmp_path, step, {"model": {"w": torch.ones(2)}}, {"step": step})
    (tmp_path / "step_00000100" / "COMPLETE").unlink()
    (tmp_path / ".tmp_step_00000101").mkdir()
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [99]
    assert remove_unfinished(tmp_path) == [".tmp_step_00000101", "step_00000100"]
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000099"]


def test_newest_checkpoint_is_by_number_not_by_text(tmp_path):
    for step in (99_999_999, 100_000_000):
        save_checkpoint(tmp_path, step, {"model": {"w": torch.ones(2)}}, {"step": step})
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [99_999_999, 100_000_000]


def test_full_disk_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    import errno

    from triscale.train import checkpoint

    save_checkpoint(tmp_path, 1, {"model": {"w": torch.ones(2)}}, {"step": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        save_checkpoint(tmp_path, 2, {"model": {"w": torch.ones(2)}}, {"step": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_resolved_config_of_a_run_round_trips(make_config, runtime, tmp_path):
    import tomllib

    Trainer(make_config(), runtime, tmp_path / "run").train()
    tree = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert resolved(from_dict(RunConfig, tree)) == tree
    assert json.loads((tmp_path / "run" / "runtime.json").read_text())["environment"]["packages"]["torch"]
