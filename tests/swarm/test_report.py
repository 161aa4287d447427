import json
import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_logs import Log, run_world

from triscale.cli.swarm_report import compare, report
from triscale.config import ConfigError
from triscale.swarm.report import Report
from triscale.swarm.timeline import MOST_ROWS, duration, ticks, timeline_svg
from triscale.swarm.twin import compare_runs


class Tags(HTMLParser):
    """Checks nesting and collects what a page refers to."""

    VOID = {"meta", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html):
    reader = Tags()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_is_whole_self_contained_and_shows_everybody(tmp_path):
    world, result, ledger = run_world("wide:entities=12", tmp_path)
    page = Report(ledger, score=world.score(result.text))
    reader = parsed(page.html())
    text = " ".join(reader.text)
    assert reader.links == [], "nothing is loaded from elsewhere"
    assert "http" not in re.sub(r"https?://\S+\.example\S*", "", text)
    for place in range(12):
        assert f"t1.{place} reader" in text
    for row in world.gold:
        assert row["Director"] in text
    assert "1.000" in text and "Nothing stood out" in text


def test_json_holds_the_same_and_parses(tmp_path):
    _, result, ledger = run_world("wide:entities=4,scripted.style=duplicate", tmp_path)
    paths = Report(ledger).write(tmp_path / "out")
    data = json.loads(paths["json"].read_text())
    assert data["totals"]["tokens_in"] == result.usage.tokens_in == data["tree"]["total"]["tokens_in"]
    assert data["contributions"]["method"] == "overlap"
    assert "spurious_parallelism" in [f["kind"] for f in data["findings"]]
    assert len(data["tasks"]) == 8


hostile = st.text(max_size=80) | st.sampled_from(["<script>alert(1)</script>", "</pre><b>", "{{ 7 * 7 }}", "a | b"])


@settings(max_examples=40, deadline=None)
@given(hostile, hostile, hostile)
def test_no_text_of_a_model_gets_into_the_markup(task, name, answer):
    log = Log(task=task).model("main", 1, calls=[("assign_task", "{}")]).assign("t1.0", 1, 0, agent=name, prompt=task)
    log.start("t1.0").model("t1.0", 1).end("t1.0", result=answer).model("main", 2, content=answer).result(answer)
    html = Report(log.ledger()).html()
    assert "<script" not in html
    assert parsed(html).links == []


@pytest.mark.parametrize(
    "log", [Log(), Log().model("main", 1).result(""), Log(mode="single").model("main", 1).result("x")]
)
def test_runs_with_nothing_in_them_have_a_report(log):
    parsed(Report(log.ledger()).html())


def test_a_thousand_agents_fit_a_page(tmp_path):
    _, _, ledger = run_world("wide:entities=1000,attributes=1,distractors=0,words=0", tmp_path, total=2000)
    html = Report(ledger).html()
    assert timeline_svg(ledger).count('class="waiting') == MOST_ROWS
    assert "more sub-agents are not drawn" in html and len(html) < 3_000_000


@given(st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_inside(length):
    marks = ticks(length)
    assert marks[0] == 0 and marks[-1] <= length * (1 + 1e-9) and 2 <= len(marks) <= 10


def test_durations_read_like_a_person_writes_them():
    assert [duration(s) for s in (0.25, 61, 200, 7500)] == ["0.25 s", "61 s", "3 min 20 s", "2 h 5 min"]


def test_the_report_command_scores_a_world_and_replays_its_final_step(tmp_path):
    run_world("wide:entities=3", tmp_path)
    folder = next(tmp_path.iterdir())
    done = CliRunner().invoke(report, [str(folder)])
    assert done.exit_code == 0, done.output
    assert "1.000" in done.output and "leave-one-out" in done.output
    assert {"report", "ledger.sqlite"} <= {p.name for p in folder.iterdir()}
    data = json.loads(CliRunner().invoke(report, [str(folder), "--json"]).output)
    assert data["contributions"]["method"] == "leave_one_out" and data["score"]["item_f1"] == 1


def test_replays_without_a_score_are_refused(tmp_path):
    log = Log().model("main", 1).result()
    (tmp_path / "events.jsonl").write_text("".join(e.model_dump_json() + "\n" for e in log.events))
    done = CliRunner().invoke(report, [str(tmp_path), "--replay", "m", "--base-url", "http://localhost"])
    assert isinstance(done.exception, ConfigError) and "cannot be scored" in str(done.exception)


def test_compare_says_when_spawning_paid_and_when_not(tmp_path):
    wide = json.loads(CliRunner().invoke(compare, ["--world", "wide:entities=10", "--json"]).output)
    assert wide["numbers"]["seconds"] == {"swarm": 6.0, "single": 31.0, "ratio": pytest.approx(6 / 31)}
    assert wide["speed_up"] == pytest.approx(31 / 6) and not any("did not pay" in line for line in wide["verdict"])
    bait = CliRunner().invoke(compare, ["--world", "adversarial:entities=10", "--out", str(tmp_path / "c")])
    assert "Spawning did not pay here: no faster" in bait.output
    again = CliRunner().invoke(compare, [str(tmp_path / "c" / "single"), str(tmp_path / "c" / "swarm")])
    assert again.output == bait.output


def test_only_a_swarm_and_a_single_agent_of_one_task_are_compared(tmp_path):
    _, first, _ = run_world("wide:entities=2", tmp_path)
    _, second, _ = run_world("wide:entities=2", tmp_path)
    _, other, _ = run_world("wide:entities=3", tmp_path, mode="single")
    with pytest.raises(ConfigError, match="modes"):
        compare_runs(first.directory, second.directory)
    with pytest.raises(ConfigError, match="different tasks"):
        compare_runs(first.directory, other.directory)
    done = CliRunner().invoke(compare, [str(first.directory)])
    assert isinstance(done.exception, ConfigError)


def test_compare_makes_the_twin_of_a_finished_run(tmp_path):
    from triscale.cli.swarm import run

    made = CliRunner().invoke(run, ["--world", "wide:entities=5", "--virtual", "--out", str(tmp_path / "r"), "--quiet"])
    assert made.exit_code == 0, made.output
    done = json.loads(CliRunner().invoke(compare, [str(tmp_path / "r"), "--json"]).output)
    assert done["numbers"]["seconds"]["swarm"] == 6.0 and done["numbers"]["seconds"]["single"] == 16.0
    assert done["numbers"]["item_f1"] == {"swarm": 1.0, "single": 1.0, "ratio": 1.0}
    events = (tmp_path / "r-single" / "events.jsonl").read_text()
    again = json.loads(CliRunner().invoke(compare, [str(tmp_path / "r"), "--json"]).output)
    assert again == done and len((tmp_path / "r-single" / "events.jsonl").read_text()) < len(events) + 2000


def test_the_width_study_writes_its_figure_and_its_numbers(tmp_path):
    from triscale.studies import swarm_width

    pytest.importorskip("matplotlib")
    rows = swarm_width.run(tmp_path, widths=[1, 5], seeds=[0])
    assert {p.name for p in tmp_path.iterdir()} == {"README.md", "results.csv", "results.json", "time-and-cost.svg"}
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
    wide = {(r["width"], r["arm"]): r for r in rows if r["kind"] == "wide"}
    assert wide[5, "swarm, 1 item each"]["seconds"] < wide[5, "single agent"]["seconds"]
    assert all(r["item_f1"] == 1 for r in wide.values())


def test_many_replays_are_made_only_when_asked_for(tmp_path, monkeypatch):
    run_world("wide:entities=3", tmp_path)
    folder = next(tmp_path.iterdir())
    monkeypatch.setattr("triscale.cli.swarm_report.FREE_REPLAYS", 2)
    unasked = CliRunner().invoke(report, [str(folder)])
    assert "by overlap (proxy)" in unasked.output and "--replay scripted" in unasked.output
    asked = CliRunner().invoke(report, [str(folder), "--replay", "scripted"])
    assert "leave-one-out" in asked.output


def test_run_times_of_assignments_are_quantiles_of_what_ran(tmp_path):
    from triscale.swarm.metrics import measure, quantile

    assert quantile([], 0.5) == 0 and quantile([3, 1, 2], 0.5) == 2 and quantile(list(range(100)), 0.95) == 94
    _, _, ledger = run_world("wide:entities=6,latency.jitter=0.5", tmp_path, total=5)
    metrics = measure(ledger)
    assert 2 < metrics.task_seconds_p50 <= metrics.task_seconds_p95 < 6


def test_the_final_step_can_be_replayed_by_a_model_over_http(tmp_path):
    """An endpoint that plays the world's script: the same contributions as without the wire between."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from triscale.swarm.types import Message, ModelRequest, ToolCall

    world, _, _ = run_world("wide:entities=4,scripted.style=duplicate", tmp_path)
    folder = next(tmp_path.iterdir())
    script, asked = world.scripted("orchestrator"), []

    def message(wire):
        calls = tuple(ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"])
                      for c in wire.get("tool_calls") or ())  # fmt: skip
        return Message(wire["role"], wire["content"] or "", calls, wire.get("tool_call_id"))

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body)
            text = script.decide(ModelRequest([message(m) for m in body["messages"]])).content
            reply = {"id": "x", "object": "chat.completion", "created": 1, "model": "m",
                     "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
                     "choices": [{"index": 0, "finish_reason": "stop",
                                  "message": {"role": "assistant", "content": text}}]}  # fmt: skip
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        done = CliRunner().invoke(report, [str(folder), "--json", "--replay", "m", "--base-url", base])
    finally:
        server.shutdown()
        server.server_close()
    assert done.exit_code == 0, done.output
    over_wire = json.loads(done.output)["contributions"]
    local = json.loads(CliRunner().invoke(report, [str(folder), "--json"]).output)["contributions"]
    assert over_wire["items"] == local["items"] and over_wire["replays"] == local["replays"] == len(asked)
    assert over_wire["replay_usage"]["tokens_in"] == 9 * len(asked)
    assert all("tools" not in body for body in asked), "with nothing to call, the model has to answer"
