"""The report from a record alone: JSON with its stated keys, a page that needs no other file."""

import io
import json
import re

import pytest
from rich.console import Console

from triscale.config import ConfigError
from triscale.ladder.records import load_record
from triscale.ladder.report import report_json, write_report
from triscale.ladder.tables import markdown, print_report, rung_cells, verdict_cells
from triscale.ladder.verdict import analyse


def test_json_has_the_stated_shape_and_is_valid_json(make_record):
    values = json.loads(json.dumps(report_json(make_record()), allow_nan=False))
    assert set(values["arms"]) == {"muonclip", "attnres"}
    for arm in values["arms"].values():
        assert arm["verdict"] in ("better", "worse", "no difference detected")
        assert len(arm["rungs"]) == 3
        for rung in arm["rungs"]:
            assert {"params", "tokens", "loss_mean", "loss_diff", "ci", "multiplier", "multiplier_ci", "n"} <= set(rung)
            assert rung["ci"][0] <= rung["loss_diff"] <= rung["ci"][1]
            assert rung["multiplier_ci"][0] <= rung["multiplier"] <= rung["multiplier_ci"][1]
            assert rung["n"] == 3


def test_the_report_comes_from_the_saved_summary_alone(make_record, tmp_path):
    record = make_record()
    record.save(tmp_path)
    assert load_record(tmp_path) == record
    assert report_json(load_record(tmp_path)) == report_json(record)


def test_a_broken_summary_names_its_file_and_field(make_record, tmp_path):
    record = make_record()
    record.save(tmp_path)
    path = tmp_path / "summary.json"
    values = json.loads(path.read_text())
    values["runs"][3]["lossy"] = 1
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"summary.json.runs\[3\].lossy: unknown key. Did you mean 'loss'"):
        load_record(path)
    with pytest.raises(ConfigError, match="no such file"):
        load_record(tmp_path / "nothing")


def test_the_page_is_self_contained_and_shows_everything(make_record, tmp_path):
    pytest.importorskip("matplotlib")
    result = analyse(make_record())
    page = write_report(result, tmp_path / "report").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["'](?!data:)""", page), "the page must load nothing"
    for text in ("muonclip", "attnres", "better", "no difference detected", "act like", "torch", "2.13.0", "3.12.1",
                 "c0ffee", "adamw", "0, 1, 2", "Largest attention logit", "Gradient norm", "Scaling over"):  # fmt: skip
        assert text in page, text
    names = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert names == {
        "multipliers.png",
        "scaling.png",
        "budgets.png",
        "train_loss.png",
        "loss.png",
        "max_logit.png",
        "grad_norm.png",
    }


def test_names_cannot_inject_markup(make_record, tmp_path):
    pytest.importorskip("matplotlib")
    record = make_record({"<script>alert(1)</script>": 1.0}, rungs=("s",), curves=False)
    page = write_report(record, tmp_path).read_text(encoding="utf-8")
    assert "<script>" not in page


def lines_of(result, width):
    stream = io.StringIO()
    print_report(result, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [90, 200])
def test_the_terminal_report_fits_and_cuts_nothing(make_record, width):
    result = analyse(make_record({"muonclip_kimi": 1.3, "attnres": 1.0}))
    lines = lines_of(result, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for arm in result.arms:
        for cell in verdict_cells(arm):
            assert cell in text, cell
    for row in rung_cells(result, 1):
        for cell in row:
            assert cell in text, cell


def test_markdown_has_the_same_cells_as_the_page(make_record):
    result = analyse(make_record({"a|b": 1.9, "attnres": 1.0}))
    rows = [line for line in markdown(result).splitlines() if line.startswith("|")]
    assert len({row.count(" | ") for row in rows[:4]}) == 1
    assert "a\\|b" in rows[2] and "\\*" in rows[2], "a bar or star in a cell must be escaped"
    assert rows[3].split(" | ")[1] == "no difference detected"
    assert len(rows) == (2 + 2) + (2 + 3 * 3)
    assert "Note: a|b: the multiplier reaches beyond the baseline's token budgets on s, m, l (*)." in markdown(result)
