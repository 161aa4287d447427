"""Runs under attack: two writers, full disks, flipped bits, broken numbers, stops at bad moments, weights that do not fit."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError

from triscale.config import ConfigError, TriScaleError, from_dict
from triscale.events import EventWriter, current_events, read_events
from triscale.train import checkpoint, evaluate, loop, run_directory
from triscale.train.checkpoint import CheckpointError, complete_checkpoints, load_checkpoint, save_checkpoint
from triscale.train.config import RunConfig, Runtime
from triscale.train.divergence import DivergedError
from triscale.train.evaluation import compare_runs, evaluate_run
from triscale.train.interrupt import Interrupted
from triscale.train.loop import Trainer
from triscale.train.progress import Progress
from triscale.train.run_directory import RunBusyError, RunDirectory
from triscale.train.start import decay_start, extend_run, find_weights


@pytest.fixture
def finished(make_config, runtime, tmp_path):
    result = Trainer(make_config(), runtime, tmp_path / "run").train()
    return tmp_path / "run", result


def test_a_run_killed_before_its_result_was_written_ends_the_same(finished, make_config, runtime):
    path, result = finished
    (path / "result.json").unlink()
    again = Trainer(make_config(), runtime, path).train()
    assert {**again, "seconds": 0} == {**result, "seconds": 0}


def test_a_finished_run_is_only_read(finished, make_config, runtime, monkeypatch):
    path, result = finished

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(run_directory, "_write_text", refuse)
    assert Trainer(make_config(), replace(runtime, threads=2), path).train() == result
    with pytest.raises(TriScaleError, match=r"Read-only file system.*same command resumes"):
        Trainer(make_config(), runtime, path.parent / "new").train()


def test_two_processes_cannot_train_one_run(make_config, runtime, tmp_path):
    first = Trainer(make_config(), runtime, tmp_path / "run")

    def second(event):
        if event["kind"] == "step" and event["data"]["step"] == 2:
            with pytest.raises(RunBusyError, match="another process"):
                Trainer(make_config(), runtime, tmp_path / "run").train()

    first.listeners = (second,)
    first.train()
    steps = [e.data["step"] for e in read_events(tmp_path / "run" / "events.jsonl") if e.kind == "step"]
    assert steps == list(range(1, 9))


@pytest.mark.parametrize("name", ["config.toml", "result.json"])
def test_damaged_files_of_a_run_are_named(finished, make_config, runtime, name):
    path, _ = finished
    (path / name).write_text("{ not = [")
    with pytest.raises(TriScaleError, match=rf"{name}.*(damaged|not valid)"):
        Trainer(make_config(), runtime, path).train()


def test_flipped_bits_in_a_checkpoint_are_found(finished, make_config, runtime):
    path, _ = finished
    newest = complete_checkpoints(path / "checkpoints")[-1][1]
    file = newest / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1  # inside a weight: the file still parses
    file.write_bytes(data)
    (path / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*sha256.*delete that folder"):
        Trainer(make_config(), runtime, path).train()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(newest)


def test_a_full_disk_below_safetensors_is_reported_as_one(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        save_checkpoint(tmp_path, 2, {"model": {"w": torch.ones(2)}}, {"step": 2})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_never_tears_the_event_log(tmp_path):
    class FullDisk:
        """Takes half of a line, then nothing, as a file system without space does."""

        def __init__(self, file):
            self.file, self.calls = file, 0

        def write(self, data):
            self.calls += 1
            if self.calls > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(bytes(data)[: len(data) // 2])

        def __getattr__(self, name):
            return getattr(self.file, name)

    writer = EventWriter(tmp_path / "events.jsonl", "run")
    writer.write("warning", message="first")
    whole, writer._file = writer._file, FullDisk(writer._file)
    with pytest.raises(OSError, match="No space"):
        writer.write("warning", message="second")
    writer._file = whole  # space again
    writer.write("warning", message="third")
    writer.close()
    assert [e.data["message"] for e in read_events(tmp_path / "events.jsonl")] == ["first", "third"]


def test_a_full_disk_while_logging_stops_with_a_plain_message_and_resumes(make_config, runtime, tmp_path, monkeypatch):
    expected = Trainer(make_config(), runtime, tmp_path / "straight").train()
    real = EventWriter.write

    def write(self, kind, **data):
        if kind == "step" and data["step"] == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, kind, **data)

    monkeypatch.setattr(EventWriter, "write", write)
    with pytest.raises(TriScaleError, match="No space left"):
        Trainer(make_config(), runtime, tmp_path / "run").train()
    monkeypatch.setattr(EventWriter, "write", real)
    assert Trainer(make_config(), runtime, tmp_path / "run").train()["loss"] == expected["loss"]


@pytest.mark.parametrize("stop_at", [0, 4, 8])
def test_a_stop_inside_an_evaluation_is_prompt_and_owes_it(make_config, runtime, tmp_path, monkeypatch, stop_at):
    config = make_config({"train": {"eval_every": 4, "eval_tokens": 512}})
    trainer, real, batches = Trainer(config, runtime, tmp_path / "straight"), evaluate.to_batch, []
    straight, each = trainer.train(), -(-trainer.heldout.rows // config.train.micro_rows)
    trainer = Trainer(config, runtime, tmp_path / "run")

    def to_batch(*arguments):
        batches.append(1)
        trainer.guard.requested |= trainer.step == stop_at
        return real(*arguments)

    monkeypatch.setattr(evaluate, "to_batch", to_batch)
    with pytest.raises(Interrupted):
        trainer.train()
    assert each > 1 and len(batches) == 1 + each * (stop_at // 4)  # the first batch of that evaluation was its last
    monkeypatch.setattr(evaluate, "to_batch", real)
    resumed = Trainer(config, runtime, tmp_path / "run").train()
    assert resumed["curve"] == straight["curve"] and resumed["loss"] == straight["loss"]


def test_a_broken_gradient_is_not_applied(make_config, runtime, tmp_path, monkeypatch):
    trainer = Trainer(make_config(), runtime, tmp_path / "run")
    real = loop.Trainer._clip

    def clip(self):
        if self.step == 3:
            self.model.embedding.weight.grad[0, 0] = float("nan")
        return real(self)

    monkeypatch.setattr(loop.Trainer, "_clip", clip)
    with pytest.raises(DivergedError, match="gradient is not finite after 3 completed steps"):
        trainer.train()
    step, newest = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert step == 3
    assert all(value.isfinite().all() for value in load_checkpoint(newest)[0]["model"].values())
    monkeypatch.setattr(loop.Trainer, "_clip", real)
    expected = Trainer(make_config(), runtime, tmp_path / "straight").train()
    assert Trainer(make_config(), runtime, tmp_path / "run").train()["loss"] == expected["loss"]


def test_a_held_out_loss_that_is_no_number_is_no_result(make_config, runtime, tmp_path, monkeypatch):
    real = loop.heldout_loss

    def broken(model, *rest):
        return real(model, *rest) | ({"loss": float("nan")} if trainer.step else {})

    monkeypatch.setattr(loop, "heldout_loss", broken)
    trainer = Trainer(make_config(), runtime, tmp_path / "run")
    with pytest.raises(DivergedError, match="held-out loss"):
        trainer.train()
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_learning_rate_of_zero_trains_nothing_and_ends(make_config, runtime, tmp_path):
    result = Trainer(make_config({"optimizer": {"lr": 0.0}}), runtime, tmp_path / "run").train()
    assert result["curve"][0][1] == result["curve"][-1][1]


def test_weights_that_do_not_fit_are_refused_by_name(finished, make_config, runtime, tmp_path):
    weights = find_weights(finished[0])
    for overrides, named in (
        ({"model": {"depth": 3}}, r"layers\.2\.mixer\.q_proj\.weight is missing there"),
        ({"model": {"depth": 1}}, r"layers\.1\.mixer\.q_proj\.weight has no place here"),
        ({"model": {"width": 16}}, r"embedding\.weight is \(300, 32\) there and \(300, 16\) here"),
        ({"model": {"tied_head": False}}, r"head\.weight is missing there"),
    ):
        with pytest.raises(ConfigError, match=named):
            Trainer(make_config(overrides), runtime, tmp_path / "new", init_from=weights).train()
    with pytest.raises(TriScaleError, match="no complete checkpoint"):
        find_weights(tmp_path)


def test_a_run_that_never_saved_may_be_corrected(make_config, runtime, tmp_path):
    with pytest.raises(ConfigError, match="row_length"):
        Trainer(make_config({"train": {"row_length": 2**16, "batch_tokens": 2**16}}), runtime, tmp_path / "run").train()
    result = Trainer(make_config(), runtime, tmp_path / "run").train()
    assert result["steps"] == 8
    starts = [e for e in current_events(tmp_path / "run" / "events.jsonl") if e.kind == "run.start"]
    assert len(starts) == 1


def test_extending_again_resumes(make_config, runtime, tmp_path):
    path, config = tmp_path / "run", make_config()
    Trainer(config, runtime, path, keep_steps=(decay_start(config),)).train()
    longer = make_config({"train": {"tokens": 12 * 256}})
    extend_run(RunDirectory(path), longer)
    extend_run(RunDirectory(path), longer)  # the same command after Ctrl-C
    assert Trainer(longer, runtime, path).train()["steps"] == 12
    extend_run(RunDirectory(path), longer)
    assert RunDirectory(path).finished


def test_evaluation_refuses_another_corpus_than_the_run_was_trained_on(make_config, runtime, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"text {number} " * 40)
    config = make_config({"data": {"corpus": {"paths": [str(texts)]}}})
    Trainer(config, runtime, tmp_path / "run").train()
    first = evaluate_run(tmp_path / "run")  # finds the run's own cache
    assert first["heldout"]["tokens"] > 0 and RunDirectory(tmp_path / "run").cache_dir == runtime.cache_dir
    (texts / "30.txt").write_text("something else " * 400)
    with pytest.raises(TriScaleError, match="trained on the corpus"):
        evaluate_run(tmp_path / "run")


def test_comparing_unfinished_or_foreign_folders_says_which(finished, tmp_path):
    path, _ = finished
    with pytest.raises(TriScaleError, match="not a run folder"):
        compare_runs(path, tmp_path)
    (path / "result.json").unlink()
    with pytest.raises(TriScaleError, match="not finished"):
        compare_runs(path, path)


def test_progress_outlives_its_reader():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed, Progress() as progress:
        progress.console.file = closed
        for _ in range(3):
            progress.note("nobody listens")
        assert progress.console.quiet
        closed_fd = closed.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), closed_fd)  # so that closing has somewhere to flush to


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"seed": -1}, "seed"),
        ({"train": {"eval_every": -1}}, "eval_every"),
        ({"train": {"grad_clip": float("nan")}}, "grad_clip"),
        ({"train": {"tokens": "many"}}, r"train\.tokens"),
        ({"model": {"mixer": {"kind": 3}}}, r"mixer\.kind"),
        ({"model": {"mixer": {"kind": ":Class"}}}, r"mixer\.kind"),
        ({"model": {"mixer": {"kind": ".relative:Class"}}}, r"mixer\.kind"),
        ({"model": 3}, "model"),
    ],
)
def test_wrong_values_are_config_errors(tree, named):
    with pytest.raises(ConfigError, match=named):
        from_dict(RunConfig, tree)


@pytest.mark.parametrize("name", ["threads", "checkpoint_every", "log_every", "keep", "checkpoint_seconds"])
def test_wrong_runtime_values_are_config_errors(name):
    with pytest.raises(ConfigError, match=name):
        from_dict(Runtime, {name: -1})
