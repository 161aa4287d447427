"""What was left out of the data stands in the run's event log, and damage is a warning."""

from __future__ import annotations

from triscale.events import current_events
from triscale.train.loop import Trainer


def test_damaged_input_is_a_warning_and_the_report_is_kept(make_config, runtime, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"document {number} says something\n" * 30)
    (folder / "cut.txt").write_bytes("text 你".encode()[:-1])
    (folder / "empty.txt").write_text("")
    config = make_config({"data": {"corpus": {"kind": "files", "paths": [str(folder)]}}, "train": {"tokens": 512}})
    Trainer(config, runtime, tmp_path / "run").train()
    events = current_events(tmp_path / "run" / "events.jsonl")
    warnings = [event.data["message"] for event in events if event.kind == "warning"]
    assert any("truncated: 1" in line and "cut.txt" in line for line in warnings)
    assert not any("empty" in line for line in warnings)
    (report,) = [event.data["data"] for event in events if event.kind == "config"]
    assert report["sources"][0]["skipped"]["empty"]["count"] == 1
    assert report["sources"][0]["documents"] == 30 and len(report["corpus_hash"]) == 64
