"""The event log: append-only, torn lines, resume."""

from __future__ import annotations

import math

import pytest

from triscale.events import EventWriter, current_events, read_events


def step(writer, number, loss=1.0):
    writer.write("step", step=number, loss=loss, lr=0.1, grad_norm=1.0, tokens=number, flops=1, seconds=1.0,
                 tokens_per_s=1.0)  # fmt: skip


def test_torn_last_line_is_left_out_and_repaired(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventWriter(path, "r") as writer:
        step(writer, 1)
    with open(path, "ab") as file:
        file.write(b'{"v": 1, "time": 3')
    assert [e.data["step"] for e in read_events(path)] == [1]
    with EventWriter(path, "r") as writer:
        step(writer, 2)
    assert [e.data["step"] for e in read_events(path)] == [1, 2]


def test_resume_voids_later_steps(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventWriter(path, "r") as writer:
        writer.write("run.start")
        for number in (1, 2, 3):
            step(writer, number)
        writer.write("run.resume", step=1)
        step(writer, 2, loss=9.0)
    assert [(e.data["step"], e.data.get("loss")) for e in current_events(path) if e.kind == "step"] == [
        (1, 1.0),
        (2, 9.0),
    ]


def test_unknown_kinds_and_missing_fields_are_refused(tmp_path):
    with EventWriter(tmp_path / "e.jsonl", "r") as writer:
        with pytest.raises(ValueError, match="not in the schema"):
            writer.write("nonsense")
        with pytest.raises(ValueError, match="lacks the fields"):
            writer.write("eval", step=1)


def test_non_finite_numbers_stay_readable(tmp_path):
    with EventWriter(tmp_path / "e.jsonl", "r") as writer:
        writer.write("eval", step=1, loss=math.nan, other=[math.inf])
    (event,) = read_events(tmp_path / "e.jsonl")
    assert event.data["loss"] == "nan" and event.data["other"] == ["inf"]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('not json\n{"v":1,"time":0,"run":"r","kind":"cache"}\n')
    with pytest.raises(ValueError, match="line 1"):
        list(read_events(path))
