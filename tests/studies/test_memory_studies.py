"""The memory studies at tiny settings: they run, resume and report what they measured."""

import json
import random
import signal

import numpy as np
import pytest

from triscale.studies import loss_by_position, memory_tasks
from triscale.train.interrupt import Interrupted

pytest.importorskip("matplotlib")


def test_memory_tasks_resumes_and_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_tasks, "EVALUATION_ROWS", 64)
    settings = {
        "tasks": ("palindrome",),
        "lengths": (8,),
        "learning_rates": (3e-3,),
        "steps": 10,
        "batch_tokens": 256,
    }
    result = memory_tasks.run(tmp_path, **settings)
    rows = result["rows"]
    assert [r["arm"] for r in rows] == ["KDA", "GDN", "attention", "LSTM"]
    assert all(0 <= r["accuracy"] <= 1 and r["steps"] > 0 for r in rows)
    assert memory_tasks.run(tmp_path, **settings)["rows"] == rows
    assert json.loads((tmp_path / "results.json").read_text()) == result
    assert "--lengths=[8]" in result["command"] and "torch" in result["environment"]["packages"]
    page = (tmp_path / "README.md").read_text()
    assert f"{100 * rows[0]['accuracy']:.1f}" in page and "## Verdict" in page
    assert (tmp_path / "accuracy.svg").stat().st_size > 0


def test_memory_tasks_keeps_finished_cells_when_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_tasks, "EVALUATION_ROWS", 8)
    settings = {
        "tasks": ("palindrome",),
        "lengths": (8,),
        "arms": ("LSTM", "attention"),
        "steps": 4,
        "batch_tokens": 64,
    }
    step, taken = memory_tasks._Attempt._one_step, []

    def stop_in_the_second_cell(self):
        taken.append(self.settings["arm"])
        step(self)
        if taken.count("attention") == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(memory_tasks._Attempt, "_one_step", stop_in_the_second_cell)
        with pytest.raises(Interrupted):
            memory_tasks.run(tmp_path, **settings)
    assert not (tmp_path / "results.json").exists()
    monkeypatch.setattr(memory_tasks._Attempt, "_one_step", lambda self: (taken.append("again"), step(self)))
    memory_tasks.run(tmp_path, **settings)
    assert taken.count("again") == taken.count("LSTM")  # the first cell was kept, the second ran from its start


def test_verdict_of_memory_tasks_follows_the_numbers():
    row = lambda arm, length, accuracy: {"task": "stacks", "arm": arm, "length": length, "accuracy": accuracy}
    said = memory_tasks.verdict([row("A", 8, 1.0), row("A", 16, 1.0), row("B", 8, 0.9995), row("B", 16, 0.4),
                                 row("C", 8, 0.2), row("C", 16, 0.1)])  # fmt: skip
    assert said == ["Stacks: A solves every length; B solves 8 (40 % at 16); C solves no length (10 % at 16)."]


def test_a_mixer_learns_a_short_palindrome():
    """The study's own loop can solve a task: chance is 1/32."""
    cell = {"task": "palindrome", "length": 8, "arm": "KDA", "seed": 0, "batch_tokens": 256}
    attempt = memory_tasks._Attempt(cell, 6e-3)
    for _ in range(60):
        attempt._one_step()
    assert memory_tasks._accuracy(attempt.model, attempt.task, 8, 0, 64) > 0.5


@pytest.fixture
def corpus(tmp_path):
    source = random.Random(0)
    for number in range(40):
        words = [
            source.choice(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"])
            for _ in range(source.randint(20, 200))
        ]
        (tmp_path / f"doc{number:02d}.txt").write_text(" ".join(words))
    return tmp_path


def test_loss_by_position_runs_and_resumes(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("study")
    overrides = {
        "model": {"width": 32, "depth": 2}, "data": {"corpus": {"kind": "files", "paths": [str(corpus)]},
                                                      "vocabulary_size": 300, "heldout_fraction": 0.2},
        "train": {"row_length": 64, "batch_tokens": 256, "micro_batch_tokens": 256, "tokens": 512, "eval_tokens": 256},
    }  # fmt: skip
    runtime = {"device": "cpu", "threads": 1, "cache": str(tmp_path_factory.mktemp("cache"))}
    settings = {"seeds": (0,), "rows": 6, "overrides": overrides, "runtime": runtime}
    result = loss_by_position.run(output, **settings)
    assert set(result["curves"]) == {"LSTM", "transformer", "Kimi Linear"}
    for curve in result["curves"].values():
        assert curve["start"][0] == 0 and curve["stop"][-1] <= 64 and np.isfinite(curve["loss"]).all()
    assert loss_by_position.run(output, **settings) == result
    page = (output / "README.md").read_text()
    assert (output / "loss-by-position.svg").exists() and "| 0 to 0 |" in page and "## Verdict" in page
    saved = json.loads((output / "results.json").read_text())
    assert saved == json.loads(json.dumps(result)) and set(saved["differences"]) == {"LSTM", "Kimi Linear"}
    for arm, difference in saved["differences"].items():
        own, other = saved["curves"][arm], saved["curves"]["transformer"]
        assert np.allclose(difference["loss"], np.subtract(own["loss"], other["loss"]), atol=1e-6)


def test_verdict_of_loss_by_position_follows_the_intervals():
    curve = lambda *loss: {"start": [0, 1], "stop": [1, 8], "loss": list(loss), "interval": [0.1, 0.1], "n": [9, 9]}
    result = {"curves": {"A": curve(4.0, 3.0), "B": curve(3.5, 3.6)}, "reference": "A",
              "differences": {"B": curve(-0.5, 0.05)}}  # fmt: skip
    first, second, third = loss_by_position.verdict(result)
    assert first == "A: 4.000 at position 0, 3.000 from 1 to 7."
    assert second.endswith("lowest from 0 to 0.")
    assert third == "B against A: below it at 0; not distinguishable from it at 1-7 (last: +0.050 ± 0.100)."


def test_summary_recovers_a_planted_curve():
    generator = np.random.default_rng(0)
    truth = 5 - np.log2(1 + np.arange(64)) / 2
    tables = [truth + generator.normal(0, 0.1, (200, 64)) for _ in range(2)]
    tables[0][:50, 40:] = tables[1][:50, 40:] = np.nan  # short documents
    curve = loss_by_position.summarise(tables, 64)
    assert curve["n"][0] == 200 and curve["n"][-1] == 200
    for start, stop, loss, half in zip(*(curve[k] for k in ("start", "stop", "loss", "interval")), strict=True):
        assert abs(loss - truth[start:stop].mean()) < max(3 * half, 0.15)
