"""The optimizer studies run at toy size, resume, and compute what they print."""

import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from triscale.config import ConfigError
from triscale.studies import muon_attribution, page, qk_clip, qk_clip_page
from triscale.studies import qk_clip_retrieval as needles
from triscale.train.interrupt import Interrupted

TINY = {"width": 16, "depth": 1, "mixer": {"kind": "grouped_query_attention", "heads": 2}}
TRAIN = {"batch_tokens": 128, "row_length": 32, "micro_batch_tokens": 128, "eval_tokens": 64}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(12):
        text = " ".join(f"line {number} holds word{number * i % 17} and more" for i in range(60))
        (folder / f"{number}.txt").write_text(text)
    return {"corpus": {"kind": "files", "paths": [str(folder)]}, "vocabulary_size": 300}


def test_retrieval_questions_have_their_answer_in_the_row():
    tokens, answers = needles.rows(16, 20, torch.Generator().manual_seed(0))
    assert tokens.shape == (16, 40) and answers.shape == (16, 20)
    far = needles.distances(tokens)
    for row, right, gaps in zip(tokens.tolist(), answers.tolist(), far.tolist(), strict=True):
        told = {token // needles.VALUES: token % needles.VALUES for token in row[:20]}
        assert len(told) == 20 and all(token < needles.QUESTION for token in row[:20])
        for place, (token, value, gap) in enumerate(zip(row[20:], right, gaps, strict=True)):
            name = token - needles.QUESTION
            assert value - needles.ANSWER == told[name]
            assert row[20 + place - gap] // needles.VALUES == name


def test_qk_clip_study_holds_the_threshold_and_resumes(tmp_path, corpus, monkeypatch):
    settings = {
        "seeds": [0, 1], "rates": [0.05], "threshold": 0.05, "tokens": 1280, "thresholds": [0.0, 0.05], "retrieval_steps": 3,
        "retrieval_facts": 8, "base": {"data": corpus, "model": TINY, "train": TRAIN}, "runtime": {"cache": str(tmp_path / "cache")},
    }  # fmt: skip
    first = qk_clip.run(tmp_path / "out", **settings)
    plain, clipped = ([row for row in first["growth"] if row["arm"] == arm] for arm in ("muon", "muonclip"))
    assert all(row["clipped_heads"] == 0 and row["max_logit"] > 0.05 for row in plain)
    assert all(row["clipped_heads"] > 0 and row["max_logit"] < plain[0]["max_logit"] for row in clipped)
    assert [row["clipped_heads"] > 0 for row in first["retrieval"]] == [False, False, True, True]
    assert set(first["retrieval"][0]["by_facts"]) == {"2", "4", "8"}
    page = (tmp_path / "out" / "README.md").read_text()
    assert "exceed 0.05 in 2 of 2 runs" in page and first["command"] in page and "runtime" not in first["command"]
    assert (tmp_path / "out" / "qk-clip.svg").exists() and first["environment"]["python"]
    written = (tmp_path / "out" / "results.json").read_bytes()

    def trained_again(*_):
        raise AssertionError("a finished run was trained again")

    monkeypatch.setattr(qk_clip.Trainer, "_one_step", trained_again)
    monkeypatch.setattr(needles, "_one_step", trained_again)
    qk_clip.run(tmp_path / "out", **settings)
    assert (tmp_path / "out" / "results.json").read_bytes() == written


def test_qk_clip_study_stops_between_steps_and_goes_on(tmp_path, corpus, monkeypatch):
    settings = {"seeds": [0], "thresholds": [0.0, 0.5], "retrieval_steps": 3, "retrieval_facts": 4, "rates": [0.01],
                "tokens": 256, "base": {"data": corpus, "model": TINY, "train": TRAIN},
                "runtime": {"cache": str(tmp_path / "cache")}}  # fmt: skip
    steps, real = [], needles._one_step

    def interrupted(*arguments):
        steps.append(1)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(needles, "_one_step", interrupted)
    with pytest.raises(Interrupted):
        qk_clip.run(tmp_path / "out", **settings)
    assert len(steps) == 4 and not (tmp_path / "out" / "results.json").exists()
    study = qk_clip.run(tmp_path / "out", **settings)
    assert len(steps) == 7 and len(study["retrieval"]) == 2


def test_qk_clip_verdict_says_what_the_numbers_say():
    curve = lambda peak: [(1, 1.0), (2, peak)]
    row = lambda arm, seed, peak, loss, rate=0.1: {
        "rate": rate, "arm": arm, "seed": seed, "max_logit": peak, "last_logit": peak, "clipped_heads": int(arm == "muonclip"),
        "spikes": 0, "loss": loss, "max_logit_curve": curve(peak), "loss_curve": curve(loss or 9.0)}  # fmt: skip
    growth = [row("muon", 0, 80.0, 4.0), row("muon", 1, 90.0, None), row("muonclip", 0, 33.0, 3.9), row("muonclip", 1, 31.0, 3.8),
              row("muon", 0, 5.0, 4.5, 0.01), row("muonclip", 0, 5.0, 4.5, 0.01)]  # fmt: skip
    answer = lambda threshold, seed, right: {
        "threshold": threshold, "seed": seed, "accuracy": right, "by_facts": {"8": right}, "by_distance": {"1 to 4": right},
        "max_logit": threshold or 20.0, "clipped_heads": int(0 < threshold < 20)}  # fmt: skip
    retrieval = [answer(t, s, r + 0.01 * s) for t, r in ((0.0, 0.9), (30.0, 0.9), (1.0, 0.4)) for s in (0, 1)]
    said = qk_clip_page.verdict({"growth": growth, "retrieval": retrieval, "settings": {"threshold": 30.0}})
    assert "exceed 30 in 2 of 2 runs (1 diverged), up to 90; MuonClip's stay below 33.0 (1.10 times" in said[0]
    assert "no difference detected" in said[0]  # one pair: nothing can be said
    assert "exceed 30 in 0 of 1 runs" in said[1] and "the same to the last bit" in said[1]
    assert said[3] == "Threshold 30 never fires there."
    assert said[4].startswith("Threshold 1 changes accuracy by -0.500") and said[4].endswith("worse.")


def test_attribution_runs_through_the_ladder_and_resumes(tmp_path, corpus, capsys, monkeypatch):
    settings = {
        "ladder": {
            "rates": [2e-3, 4e-3],
            "base": {"data": corpus, "train": TRAIN, "model": TINY},
            "rungs": [{"name": "only", "tokens": 2560, "budgets": [0.25, 1.0], "config": {}}],
        },
        "seeds": [0, 1],
        "arms": ["adamw-rms", "muon", "muonclip"],
        "runtime": {"cache": str(tmp_path / "cache")},
    }
    study = muon_attribution.run(tmp_path / "out", **settings)
    assert set(study["arms"]) == {"adamw-rms", "muon", "muonclip"} and study["arms"]["muonclip"]["n"] == 2
    steps = [item for item in study["ingredients"].values() if item["how"] == "step"]
    assert sum(item["share"] for item in steps) == pytest.approx(1.0)
    assert math.prod(item["factor"] for item in steps) == pytest.approx(study["arms"]["muonclip"]["multiplier"])
    clip = study["ingredients"]["QK-Clip"]  # the threshold of 100 is out of reach here
    assert clip["factor"] == 1.0 and clip["share"] == 0.0 and clip["interval"] == [1.0, 1.0]
    assert study["ingredients"]["weight decay"]["factor"] is None
    assert "QK-Clip" in capsys.readouterr().out
    page = (tmp_path / "out" / "README.md").read_text()
    assert "the same to the last bit" in page and "| muonclip |" in page
    assert (tmp_path / "out" / "attribution.svg").exists()
    written = (tmp_path / "out" / "results.json").read_bytes()

    def trained_again(*_):
        raise AssertionError("a finished run was trained again")

    monkeypatch.setattr(qk_clip.Trainer, "_one_step", trained_again)
    muon_attribution.run(tmp_path / "out", **settings)
    assert (tmp_path / "out" / "results.json").read_bytes() == written


def test_every_ingredient_names_known_arms():
    for _, *pair in muon_attribution.INGREDIENTS.values():
        assert set(pair) <= set(muon_attribution.ARMS)
    with pytest.raises(ConfigError, match="nonsense"):
        muon_attribution.run(Path("unused"), arms=["nonsense"])


def test_plans_say_what_a_study_costs(tmp_path, corpus):
    runtime = {"cache": str(tmp_path / "cache")}
    text = qk_clip.plan(base={"data": corpus, "model": TINY, "train": TRAIN}, seeds=[0], runtime=runtime)
    assert "growth: 6 runs of 400,000 tokens" in text and "retrieval: 6 runs of 360 steps" in text
    ladder = {"base": {"data": corpus, "train": TRAIN, "model": TINY}}
    text = muon_attribution.plan(ladder=ladder, arms=["muon"], runtime=runtime)
    assert "muon" in text and re.search(r"together about \d+ minutes", text)


def test_a_page_names_the_command_that_makes_it_again():
    command = page.command_line("qk-clip", qk_clip.run, {"seeds": [4], "tokens": 400_000, "base": {"a": {"b": "c"}}})
    assert command == "triscale study qk-clip '--seeds=[4]' '--base.a.b=\"c\"'"
