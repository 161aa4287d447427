"""``triscale study NAME --dry-run`` says what a study would cost, and leaves nothing behind."""

import re

import pytest
from click.testing import CliRunner

from triscale.cli.main import cli

TRAIN = "row_length=32 batch_tokens=64 micro_batch_tokens=64"
MODEL = (
    "--{0}.model.width=16 --{0}.model.depth=1 --{0}.model.mixer.heads=2 --{0}.model.mixer.kind=grouped_query_attention"
)
TINY = {
    "memory-tasks": "--steps=60 --lengths=[8,16]",
    "loss-by-position": "--overrides.model.width=16 --overrides.model.depth=4 --overrides.data.vocabulary_size=300 "
    + " ".join(f"--overrides.train.{word}" for word in TRAIN.split()),
    "attnres": "--width=16 --depth=4 --row_length=32 --batch_tokens=64 --vocabulary=300 --corpus={corpus}",
    "qk-clip": MODEL.format("base") + " " + " ".join(f"--base.train.{word}" for word in TRAIN.split()),
    "muon-attribution": MODEL.format("ladder.base")
    + " --arms=['muon'] --ladder.base.data={{corpus={corpus},vocabulary_size=300}}",
}


@pytest.mark.parametrize("name", TINY)
def test_dry_run_prints_the_cost(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where prepared corpora go
    (tmp_path / "corpus").mkdir()
    for number in range(12):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"line {number} holds word and more " * 60)
    corpus = f"{{kind='files',paths=['{tmp_path / 'corpus'}']}}"
    words = TINY[name].format(corpus=corpus).split()
    done = CliRunner().invoke(cli, ["study", name, "--dry-run", "--output", str(tmp_path / "out"), *words])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "out").exists()
    if name == "memory-tasks":  # tasks x lengths x mixers
        assert f"together at most {3 * 2 * 4 * 60:,} steps" in done.output
    else:
        assert re.search(r"together about \d+ minutes", done.output), done.output
