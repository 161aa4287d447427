"""A tiny corpus and run config that train in a second."""

from __future__ import annotations

import random

import pytest

from triscale.config import from_dict, overlay
from triscale.train.config import RunConfig, Runtime

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
]


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    source = random.Random(0)
    for number in range(60):
        lines = [" ".join(source.choices(WORDS, k=8)) for _ in range(source.randint(5, 60))]
        (folder / f"doc{number:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def runtime(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    return Runtime(device="cpu", threads=1, cache=cache, checkpoint_seconds=1e9)


@pytest.fixture
def make_config(module_config):
    """``make_config({"train": {...}})``: the tiny run with overrides laid over it."""
    return module_config


@pytest.fixture(scope="session")
def module_config(corpus_folder):
    """:func:`make_config` for fixtures that outlive a test."""

    def make(overrides: dict | None = None) -> RunConfig:
        base = {
            "model": {"width": 32, "depth": 2, "mixer": {"kind": "grouped_query_attention", "heads": 2}},
            "data": {"corpus": {"kind": "files", "paths": [str(corpus_folder)]}, "vocabulary_size": 300},
            "optimizer": {"kind": "adamw", "lr": 3e-3},
            "schedule": {"kind": "wsd", "warmup_length": 2, "decay": 0.25},
            "train": {
                "tokens": 8 * 256, "batch_tokens": 256, "row_length": 64, "micro_batch_tokens": 128,
                "precision": "fp32", "eval_tokens": 512,
            },
        }  # fmt: skip
        return from_dict(RunConfig, overlay(base, overrides or {}))

    return make
