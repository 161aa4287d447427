"""The command line: verbs, errors, dry runs, and a run from training to text."""

from __future__ import annotations

import json
import tomllib

import pytest
from click.testing import CliRunner

from triscale.cli.main import VERBS, cli, main
from triscale.config import TriScaleError


def invoke(*arguments: str):
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number}.txt").write_text("\n".join(f"line {i} of text {number}" for i in range(60)))
    return folder


@pytest.fixture(scope="module")
def settings(corpus, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return [
        f"--data.corpus={{kind = 'files', paths = ['{corpus}']}}", "--data.vocabulary_size=400", "--model.width=32",
        "--model.depth=2", "--train.tokens=4096", "--train.batch_tokens=512", "--train.row_length=64",
        "--train.micro_batch_tokens=512", "--train.eval_tokens=512", f"--runtime.cache={cache}", "--runtime.threads=1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(settings, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    result = invoke("train", "--run", str(path), *settings)
    assert result.exit_code == 0, result.output
    return path


def test_bare_command_lists_every_verb_on_one_line_each():
    lines = invoke().output.splitlines()
    for verb, (_, text) in VERBS.items():
        assert any(line.split()[:1] == [verb] for line in lines), verb
        assert text.endswith(".")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_answers_help(verb):
    assert invoke(verb, "--help").exit_code == 0


def test_unknown_verb_names_the_nearest(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["triscale", "trian"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "Did you mean 'train'" in capsys.readouterr().err


def test_user_errors_have_no_traceback(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["triscale", "config", "show", "--model.widht=3"])
    with pytest.raises(SystemExit) as stop:
        main()
    text = capsys.readouterr().err
    assert stop.value.code == 2 and "config.model.widht: unknown key. Did you mean 'width'" in text
    assert "Traceback" not in text


def test_config_show_round_trips(tmp_path):
    text = invoke("config", "show", "--model.residual.kind=block_attention", "--optimizer=muonclip").output
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert invoke("config", "show", str(file)).output == text
    assert tomllib.loads(text)["model"]["residual"] == {"kind": "block_attention", "block": 4}


def test_dry_run_reports_costs_and_trains_nothing(settings, tmp_path):
    result = invoke("train", "--run", str(tmp_path / "no"), "--dry-run", *settings)
    for word in ("parameters", "tokens", "FLOPs", "memory", "minutes"):
        assert word in result.output
    planned = json.loads(invoke("train", "--run", str(tmp_path / "no"), "--dry-run", "--json", *settings).output)
    assert planned["tokens"] == 4096 and planned["flops"] > 0
    assert not (tmp_path / "no").exists()


def test_float16_and_missing_devices_are_refused(settings, tmp_path):
    with pytest.raises(TriScaleError, match="fp16"):
        invoke("train", "--run", str(tmp_path / "a"), "--train.precision=fp16", *settings)
    with pytest.raises(TriScaleError, match=r"runtime\.device"):
        invoke("train", "--run", str(tmp_path / "b"), *settings, "--runtime.device=cuda:7")


def test_generate_streams_text_and_is_repeatable(trained):
    texts = [invoke("generate", str(trained), "--prompt", "line 3", "--tokens", "12").output for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].startswith("line 3") and len(texts[0]) > len("line 3")


def test_eval_own_text_and_needles(trained, corpus):
    result = json.loads(
        invoke("eval", str(trained), "--json", "--text", str(corpus / "1.txt"), "--needle", "128").output
    )
    assert result["heldout"]["loss"] > 0 and result["text"]["bits_per_byte"] > 0
    assert result["needle"]["128"]["n"] == 21


def test_compare_two_runs(trained, settings, tmp_path):
    invoke("train", "--run", str(tmp_path / "second"), *settings, "--optimizer.lr=0.01")
    result = json.loads(invoke("compare", str(trained), str(tmp_path / "second"), "--json").output)
    assert result["config"] == ["optimizer.lr: 0.001 -> 0.01"]
    assert result["same_corpus"] and len(result["numbers"]["loss"]) == 2


def test_init_from_takes_the_weights(trained, settings, tmp_path):
    result = invoke("train", "--run", str(tmp_path / "next"), "--init-from", str(trained), "--json", *settings)
    curve = json.loads(result.output.splitlines()[-1])["curve"]
    first = json.loads((trained / "result.json").read_text())
    assert curve[0][1] == pytest.approx(first["loss"], abs=1e-3)


def test_doctor_reports_environment_and_backends():
    report = json.loads(invoke("doctor", "--json").output)
    assert report["environment"]["python"] and report["backends"] and report["optional packages"]


def test_studies_list_their_questions_and_refuse_unknown_settings():
    assert "memory-tasks" in invoke("study").output
    assert "steps" in invoke("study", "memory-tasks", "--dry-run").output
    with pytest.raises(TriScaleError, match="Did you mean 'steps'"):
        invoke("study", "memory-tasks", "--dry-run", "--stpes=3")


def test_ladder_list_and_bad_shard(tmp_path):
    assert "demo" in invoke("ladder", "list").output
    with pytest.raises(TriScaleError, match="--shard"):
        invoke("ladder", "run", "demo", "--shard", "2/2", "--runs", str(tmp_path))
    with pytest.raises(TriScaleError, match="needs a recorded ladder"):
        invoke("ladder", "check", "--simulate-only")
