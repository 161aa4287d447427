"""Commands under attack: closed pipes, old terminals, failing disks, odd prompts, unknown settings."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types

import pytest
from click.testing import CliRunner

from triscale.cli import study
from triscale.cli.main import cli, main
from triscale.config import ConfigError, TriScaleError
from triscale.train.interrupt import Interrupted


def invoke(*arguments: str):
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / "texts" / f"{number}.txt").write_text("\n".join(f"Zeile {i} über {number} → ∞" for i in range(30)))
    settings = [
        f"--data.corpus={{kind = 'files', paths = ['{folder / 'texts'}']}}", "--data.vocabulary_size=300",
        "--model.width=16", "--model.depth=1", "--train.tokens=256", "--train.batch_tokens=128",
        "--train.row_length=32", "--train.eval_tokens=128", f"--runtime.cache={folder / 'cache'}",
    ]  # fmt: skip
    assert invoke("train", "--run", str(folder / "run"), *settings).exit_code == 0
    return folder / "run"


def test_a_terminal_without_utf8_shows_question_marks(trained, monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="latin-1", write_through=True))
    monkeypatch.setattr("sys.argv", ["triscale", "generate", str(trained), "--prompt", "→ ∞ über", "--tokens", "3"])
    main()
    assert shown.getvalue().startswith("? ? über".encode("latin-1"))


def test_a_closed_pipe_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "triscale", "--help"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert b"Traceback" not in done.stderr and done.returncode in (1, 141)


def test_failing_disks_have_no_traceback(capsys, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", "/nowhere/runs")

    monkeypatch.setattr("triscale.cli.main.cli", fail)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "error: [Errno 13] Permission denied: '/nowhere/runs'" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["", "Z", "<|eos|>", "\x00"])
def test_odd_prompts_are_continued(trained, prompt):
    result = invoke("generate", str(trained), "--prompt", prompt, "--tokens", "3", "--temperature", "0")
    assert result.exit_code == 0 and result.output.startswith(prompt)


def test_foreign_folders_are_named(trained, tmp_path):
    for verb in (("generate",), ("eval",), ("config", "show", "--run")):
        with pytest.raises(TriScaleError, match="run folder"):
            invoke(*verb, str(tmp_path))
    assert invoke("generate", str(tmp_path / "missing")).exit_code != 0
    with pytest.raises(TriScaleError, match="not a run folder"):
        invoke("train", "--run", str(tmp_path / "new"), "--extend", "--train.tokens=5")
    assert not (tmp_path / "new").exists()


def test_study_settings_are_checked_and_a_stop_is_no_traceback(monkeypatch):
    def run(output, seeds=(0,)):
        raise Interrupted

    monkeypatch.setitem(study.STUDIES, "mine", ("triscale.cli.fake_study", "Why?"))
    monkeypatch.setitem(sys.modules, "triscale.cli.fake_study", types.SimpleNamespace(run=run))
    with pytest.raises(ConfigError, match=r"unknown setting.*seeds"):
        invoke("study", "mine", "--sedes=[1]")
    result = CliRunner().invoke(cli, ["study", "mine", "--seeds=[1]"])
    assert result.exit_code == 130 and "resumes" in result.output


def test_every_ladder_verb_that_trains_has_a_dry_run(tmp_path, monkeypatch):
    from triscale.ladder.plan import CellPlan, LadderPlan

    row = CellPlan("small", "baseline", 1000, 0.0, 2000, 10**9, 2**30, 1.5)
    monkeypatch.setattr("triscale.ladder.plan.plan_ladder", lambda runner: LadderPlan((row,), 2, 3.0))
    monkeypatch.setattr(
        "triscale.ladder.tune.plan_tuning", lambda runner, arms, rungs: LadderPlan((row,), 4, 6.0, "rate")
    )
    monkeypatch.chdir(tmp_path)
    for verb in (["run", "demo"], ["tune", "demo"], ["check"]):
        output = invoke("ladder", *verb, "--dry-run").output
        assert "1.00 GiB" in output and "minutes" in output
    assert not list(tmp_path.iterdir())
