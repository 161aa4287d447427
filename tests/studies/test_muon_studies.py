"""The optimizer studies run at toy size, resume, and compute what they print."""

import json
import math

import pytest
import torch

from triscale.ladder.statistics import Estimate
from triscale.studies import muon_attribution, qk_clip

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
    tokens, answers = qk_clip.retrieval_batch(16, 34, torch.Generator().manual_seed(0))
    assert tokens.shape == (16, 34)
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        keys, values, asked = row[:-2:2], row[1:-2:2], row[-1]
        assert {v for k, v in zip(keys, values, strict=True) if k == asked} == {answer}
        assert all(k < qk_clip.PAIRS <= v < 2 * qk_clip.PAIRS for k, v in zip(keys, values, strict=True))


def test_qk_clip_study_holds_the_threshold_and_resumes(tmp_path, corpus):
    settings = {
        "seeds": [0], "rates": [0.05], "threshold": 0.05, "tokens": 1280, "thresholds": [0.0, 0.05], "retrieval_steps": 3,
        "retrieval_length": 16, "base": {"data": corpus, "model": TINY, "train": TRAIN}, "runtime": {"cache": str(tmp_path / "cache")},
    }  # fmt: skip
    first = qk_clip.run(tmp_path / "out", **settings)
    arms = {row["arm"]: row for row in first["growth"]}
    assert arms["muon"]["clipped_heads"] == 0 and arms["muon"]["max_logit"] > 0.05
    assert arms["muonclip"]["clipped_heads"] > 0
    assert [row["clipped_heads"] > 0 for row in first["retrieval"]] == [False, True]
    assert json.loads(json.dumps(qk_clip.run(tmp_path / "out", **settings))) == json.loads(json.dumps(first))


class Arm:
    def __init__(self, mean, se, df=4.0):
        self.multipliers = {"tokens": Estimate(mean, se, df, 5)}


def test_shares_are_differences_of_log_multipliers():
    arms = {"muonclip": Arm(math.log(2.0), 0.1), "muon": Arm(math.log(1.8), 0.1), "adamw-rms": Arm(math.log(1.2), 0.0)}
    clip = muon_attribution.shares(arms, "muonclip", "muon")
    assert clip["factor"] == pytest.approx(2 / 1.8) and clip["share"] == pytest.approx(math.log(2 / 1.8) / math.log(2))
    assert clip["interval"][0] < 1 < clip["interval"][1]
    assert muon_attribution.shares(arms, "adamw-rms", "adamw")["factor"] == pytest.approx(1.2)
    assert muon_attribution.shares(arms, "muon", "muon-no-rms")["share"] is None


def test_attribution_runs_through_the_ladder(tmp_path, corpus, capsys):
    ladder = {
        "rates": [1e-3, 2e-3, 4e-3],
        "base": {"data": corpus, "train": TRAIN, "model": TINY},
        "rungs": [{"name": "only", "tokens": 1280, "budgets": [0.5, 1.0], "config": {}}],
    }
    study = muon_attribution.run(
        tmp_path / "out",
        seeds=[0, 1],
        arms=["muonclip", "muon"],
        ladder=ladder,
        runtime={"cache": str(tmp_path / "cache")},
    )
    assert set(study["arms"]) == {"muonclip", "muon"} and study["arms"]["muonclip"]["n"] == 2
    assert "QK-Clip" in capsys.readouterr().out
    assert (tmp_path / "out" / "attribution.json").exists()


def test_every_ingredient_names_known_arms():
    for pair in muon_attribution.INGREDIENTS.values():
        assert set(pair) <= set(muon_attribution.ARMS)
