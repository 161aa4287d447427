"""Trackers read the event log: everything once, in order, and never in the way of the run."""

import inspect
import math
import sys
import time
import types

import pytest

from triscale.config import ConfigError, MissingExtraError
from triscale.events import Event, EventWriter
from triscale.train import trackers
from triscale.train.trackers import Follower, follow, make_tracker, metrics, tracking


class Recorder:
    """A tracker that remembers its calls; ``broken`` fails at the n-th log."""

    name = "recorder"

    def __init__(self, broken: int = -1):
        self.calls, self.broken = [], broken

    def start(self, run, config):
        self.calls.append(("start", run, config))

    def log(self, step, values):
        if len(self.steps) == self.broken:
            raise ConnectionError("the service is away")
        self.calls.append(("log", step, values))

    def finish(self, summary):
        self.calls.append(("finish", summary))

    @property
    def steps(self):
        return [call[1] for call in self.calls if call[0] == "log"]


def write_steps(run_dir, first, last, *, loss=lambda step: 5.0 - 0.1 * step, end=None, resume=None):
    with EventWriter(run_dir / "events.jsonl", run_dir.name) as events:
        if resume is not None:
            events.write("run.resume", step=resume)
        for step in range(first, last + 1):
            events.write("step", step=step, loss=loss(step), lr=1e-3, grad_norm=1.5, tokens=step * 64, flops=1e6,
                         seconds=0.1, tokens_per_s=640.0)  # fmt: skip
        if end:
            events.write("eval", step=last, loss=4.0, bits_per_byte=1.5)
            events.write("run.end", outcome=end)


def event(kind, **data):
    return Event(time=0.0, run="r", kind=kind, data=data)


def test_names_and_values_of_metrics():
    assert metrics(event("step", step=3, loss=2.5, lr=1e-3)) == {"train/loss": 2.5, "train/lr": 1e-3}
    assert metrics(event("eval", step=3, loss=2.0, note="x", ok=True)) == {"eval/loss": 2.0}
    logits = event("logits", step=3, max_logits={"layers.0": [1.0, 7.0], "layers.3": [2.0, "-inf"]})
    assert metrics(logits) == {"max_logit/layers.0": 7.0, "max_logit/layers.3": 2.0, "max_logit/all": 7.0}
    router = event("router", step=3, load={"layers.1": [1.0, 3.0]}, dropped=0)
    assert metrics(router) == {"router/load/layers.1/min": 1.0, "router/load/layers.1/mean": 2.0,
                               "router/load/layers.1/max": 3.0, "router/dropped": 0.0}  # fmt: skip
    assert metrics(event("checkpoint", step=3, path="p")) == {}


def test_numbers_that_are_none_are_left_out():
    assert metrics(event("step", step=1, loss="nan", lr=math.inf, tokens=64)) == {"train/tokens": 64.0}


def test_everything_is_sent_once_in_order(tmp_path):
    (tmp_path / "config.toml").write_text("seed = 4\n")
    write_steps(tmp_path, 1, 5, end="completed")
    recorder = Recorder()
    follow(tmp_path, recorder)
    assert recorder.calls[0] == ("start", tmp_path.name, {"seed": 4})
    assert recorder.steps == [1, 2, 3, 4, 5, 5]
    assert recorder.calls[-1] == ("finish", {"outcome": "completed"})
    again = Recorder()
    follow(tmp_path, again)
    assert again.calls == []


def test_a_resumed_run_continues_without_repeats(tmp_path):
    write_steps(tmp_path, 1, 5)
    follow(tmp_path, Recorder())
    write_steps(tmp_path, 4, 8, resume=3, end="completed")
    second = Recorder()
    follow(tmp_path, second)
    assert second.steps == [6, 7, 8, 8]


def test_steps_voided_before_they_were_read_are_not_sent(tmp_path):
    write_steps(tmp_path, 1, 5)
    write_steps(tmp_path, 4, 6, resume=3, loss=lambda step: -float(step))
    recorder = Recorder()
    follow(tmp_path, recorder)
    assert recorder.steps == [1, 2, 3, 4, 5, 6]
    assert [call[2]["train/loss"] for call in recorder.calls if call[0] == "log"][3:] == [-4.0, -5.0, -6.0]


def test_a_line_being_written_is_read_next_time(tmp_path):
    write_steps(tmp_path, 1, 2)
    log = tmp_path / "events.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:-20])
    follower = Follower(tmp_path, Recorder())
    follower.drain()
    assert follower.tracker.steps == [1]
    log.write_bytes(whole)
    follower.drain()
    assert follower.tracker.steps == [1, 2]


def test_a_run_without_a_log_starts_no_tracker(tmp_path):
    recorder = Recorder()
    follow(tmp_path, recorder)
    assert recorder.calls == []


def test_live_tracking_sees_steps_while_the_run_goes_on(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(trackers.TRACKERS, "recorder", lambda run_dir: recorder)
    with tracking(tmp_path, ["recorder", "recorder"], poll=0.01):
        write_steps(tmp_path, 1, 3)
        deadline = time.monotonic() + 20
        while recorder.steps != [1, 2, 3] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert recorder.steps == [1, 2, 3]
        write_steps(tmp_path, 4, 4, end="completed")
    assert recorder.steps == [1, 2, 3, 4, 4] and recorder.calls[-1][0] == "finish"


def test_an_error_of_the_run_still_sends_the_rest(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(trackers.TRACKERS, "recorder", lambda run_dir: recorder)
    with pytest.raises(KeyboardInterrupt), tracking(tmp_path, ["recorder"], poll=60):
        write_steps(tmp_path, 1, 2)
        raise KeyboardInterrupt
    assert recorder.steps == [1, 2]


def test_a_failing_service_does_not_break_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(trackers.TRACKERS, "recorder", lambda run_dir: Recorder(broken=1))
    with tracking(tmp_path, ["recorder"], poll=0.01):
        write_steps(tmp_path, 1, 3)
    assert "ConnectionError: the service is away" in capsys.readouterr().err
    later = Recorder()
    follow(tmp_path, later)
    assert later.steps == [1, 2, 3]


def test_unknown_and_missing_trackers_are_refused_before_the_run(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no tracker is called 'mlflow'.*tensorboard, wandb, trackio"):
        make_tracker("mlflow", tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'triscale\[wandb\]'"), tracking(tmp_path, ["wandb"]):
        raise AssertionError("the body must not start")


def test_tensorboard_files_hold_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, 1, 4)
    follow(tmp_path, make_tracker("tensorboard", tmp_path))
    write_steps(tmp_path, 3, 6, resume=2, end="completed")
    follow(tmp_path, make_tracker("tensorboard", tmp_path))
    reader = EventAccumulator(str(tmp_path / "trackers" / "tensorboard"))
    reader.Reload()
    loss = {e.step: e.value for e in reader.Scalars("train/loss")}
    assert loss == pytest.approx({step: 5.0 - 0.1 * step for step in range(1, 7)})
    assert [e.value for e in reader.Scalars("eval/bits_per_byte")] == [1.5]


def fake_module(name, calls):
    """A stand-in for wandb or trackio that records its calls, held to the real signatures if the package is here."""
    try:
        real = __import__(name)
    except ImportError:
        real = None

    def record(path, target=None):
        def call(*args, **kwargs):
            if target is not None:
                inspect.signature(target).bind(*args, **kwargs)
            calls.append((path, args, kwargs))

        return call

    module = types.ModuleType(name)
    if name == "trackio":
        for item in ("init", "log", "finish"):
            setattr(module, item, record(item, real and getattr(real, item)))
        return module
    run = types.SimpleNamespace(summary={}, log=record("log"), finish=record("finish"))
    begin = record("init", real and real.init)
    module.init = lambda *args, **kwargs: (begin(*args, **kwargs), run)[1]
    return module


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_service_adapters_make_the_right_calls(name, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, name, fake_module(name, calls))
    run_dir = tmp_path / "small"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("seed = 4\n")
    write_steps(run_dir, 1, 2, end="completed")
    follow(run_dir, make_tracker(name, run_dir))
    assert [call[0] for call in calls] == ["init", "log", "log", "log", "finish"]
    begin = calls[0][2]
    assert begin["project"] == "triscale" and begin["config"] == {"seed": 4} and begin["resume"] == "allow"
    assert calls[1][1][0]["train/loss"] == pytest.approx(4.9) and calls[1][2] == {"step": 1}
    follow(run_dir, make_tracker(name, run_dir))
    assert len(calls) == 5
    write_steps(run_dir, 3, 3, resume=2)
    follow(run_dir, make_tracker(name, run_dir))
    assert calls[5][2] == begin, "a resumed run must join the same tracked run"


@pytest.mark.slow
def test_wandb_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_steps(tmp_path, 1, 3, end="completed")
    follow(tmp_path, make_tracker("wandb", tmp_path))
    assert list((tmp_path / "trackers" / "wandb").glob("offline-run-*/*.wandb"))
