"""The memory studies at tiny settings: they run, resume and report what they measured."""

import json
import random

import numpy as np
import pytest

from triscale.studies import loss_by_position, memory_tasks

pytest.importorskip("matplotlib")


def test_memory_tasks_resumes_and_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_tasks, "EVALUATION_ROWS", 64)
    settings = {
        "tasks": ("palindrome",),
        "lengths": (8,),
        "learning_rates": (3e-3,),
        "seconds": 0.4,
        "batch_tokens": 256,
    }
    rows = memory_tasks.run(tmp_path, **settings)
    assert [r["arm"] for r in rows] == ["KDA", "GDN", "attention", "LSTM"]
    assert all(0 <= r["accuracy"] <= 1 and r["steps"] > 0 for r in rows)
    again = memory_tasks.run(tmp_path, **settings)
    assert again == rows
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
    assert f"{100 * rows[0]['accuracy']:.1f}" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "accuracy.svg").stat().st_size > 0


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
    assert (output / "loss-by-position.svg").exists() and "| 0 to 0 |" in (output / "README.md").read_text()


def test_summary_recovers_a_planted_curve():
    generator = np.random.default_rng(0)
    truth = 5 - np.log2(1 + np.arange(64)) / 2
    tables = [truth + generator.normal(0, 0.1, (200, 64)) for _ in range(2)]
    tables[0][:50, 40:] = tables[1][:50, 40:] = np.nan  # short documents
    curve = loss_by_position.summarise(tables, 64)
    assert curve["n"][0] == 200 and curve["n"][-1] == 200
    for start, stop, loss, half in zip(*(curve[k] for k in ("start", "stop", "loss", "interval")), strict=True):
        assert abs(loss - truth[start:stop].mean()) < max(3 * half, 0.15)
