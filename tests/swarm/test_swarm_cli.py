"""``triscale swarm run`` and ``resume`` as a user meets them: output, exit codes, Ctrl-C, what is refused."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from triscale.cli.swarm import swarm
from triscale.config import ConfigError
from triscale.events import read_events
from triscale.swarm import clock, live
from triscale.swarm.live import LiveState, LiveView

WORLD = ["--world", "wide:entities=6,attributes=2"]


def invoke(*arguments):
    return CliRunner().invoke(swarm, [str(a) for a in arguments], catch_exceptions=False)


def kinds(folder):
    return [event.kind for event in read_events(folder / "events.jsonl")]


def test_a_world_runs_scores_and_leaves_a_run_folder(tmp_path):
    done = invoke("run", *WORLD, "--virtual", "--out", tmp_path / "r", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report["outcome"] == "completed" and report["score"]["item_f1"] == 1.0
    assert report["outcomes"] == {"completed": 6} and not report["partial"] and report["resume"] == ""
    assert {"config.toml", "events.jsonl"} <= {path.name for path in (tmp_path / "r").iterdir()}
    assert kinds(tmp_path / "r")[-1] == "result"


def test_plain_output_says_everything_a_person_must_know(tmp_path):
    done = invoke("run", *WORLD, "--virtual", "--out", tmp_path / "r", "--limits.total=4")
    assert done.stdout.startswith("| Institute |")
    for text in ("run folder", "total 4", "t1.5 reader: not_started (total = 4 reached", "assignments: 4 completed",
                 "PARTIAL", "score: item_f1", "triscale swarm report"):  # fmt: skip
        assert text in done.stderr, text


def test_the_single_twin_takes_the_same_task(tmp_path):
    one = json.loads(invoke("run", *WORLD, "--virtual", "--single", "--out", tmp_path / "1", "--json").stdout)
    many = json.loads(invoke("run", *WORLD, "--virtual", "--out", tmp_path / "2", "--json").stdout)
    assert one["text"] == many["text"] and one["outcomes"] == {}
    assert one["seconds"] > 2 * many["seconds"]


def test_dry_run_names_the_worst_case_and_writes_nothing(tmp_path):
    done = invoke("run", *WORLD, "--dry-run", "--out", tmp_path / "r", "--limits.tokens=1000")
    assert "worst case:" in done.stdout and "tokens 1000" in done.stdout and not (tmp_path / "r").exists()
    plan = json.loads(invoke("run", *WORLD, "--dry-run", "--json").stdout)
    assert plan["worst_case"]["model_calls"] == 100 + 1000 * 50 and "assign_task" in plan["delegation"]


def test_chaos_can_be_injected_from_the_command_line(tmp_path):
    done = invoke("run", *WORLD, "--virtual", "--out", tmp_path / "r", "--json", "--chaos.server_error=0.3")
    assert json.loads(done.stdout)["score"]["success"] == 1.0
    events = list(read_events(tmp_path / "r" / "events.jsonl"))
    assert any(event.data["retries"] for event in events if event.kind == "model.reply")


def test_a_limit_exits_with_one_and_resumes_when_raised(tmp_path):
    first = invoke("run", *WORLD, "--virtual", "--out", tmp_path / "r", "--limits.wall_seconds=3.2")
    assert first.exit_code == 1 and "limit: wall_seconds = 3.2" in first.stderr
    assert f"continue with: triscale swarm resume {tmp_path / 'r'}" in first.stderr
    again = invoke("resume", tmp_path / "r", "--limits.wall_seconds=100", "--json")
    report = json.loads(again.stdout)
    assert again.exit_code == 0 and report["score"]["success"] == 1.0
    calls = [e.data["call"] for e in read_events(tmp_path / "r" / "events.jsonl")
             if e.kind == "model.reply" and e.data["outcome"] == "completed"]  # fmt: skip
    assert len(calls) == len(set(calls))


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], "task"),
        (["question"], "model"),
        (["question", "--model", "m", "--base-url", "nowhere"], "base_url"),
        (["question", "--model", "m", "--virtual"], "virtual"),
        ([*WORLD, "--limits.concurent=3"], "Did you mean 'concurrent'"),
        ([*WORLD, "--limits.concurrent=0"], "limits.concurrent"),
        (["q", "--model", "m", "--docs", "/nonexistent/folder", "--dry-run"], "docs"),
        (["--world", "tall"], "kind"),
        (["q", "--model", "m", "--limits.cost=1.0"], "model.prices"),
    ],
)
def test_mistakes_are_named(arguments, named):
    with pytest.raises(ConfigError, match=named):
        invoke("run", *arguments)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    first = invoke("run", *WORLD, "--virtual", "--out", tmp_path / "r", "--json")
    before = (tmp_path / "r" / "events.jsonl").read_bytes()
    again = invoke("resume", tmp_path / "r", "--json")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert (tmp_path / "r" / "events.jsonl").read_bytes() == before


def test_resume_refuses_another_question(tmp_path):
    invoke("run", *WORLD, "--virtual", "--out", tmp_path / "r", "--quiet")
    with pytest.raises(ConfigError, match="world: cannot change"):
        invoke("resume", tmp_path / "r", "--world=deep")


def test_documents_and_an_echo_model(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# A\n\nThe answer is 42.")
    (tmp_path / "c.toml").write_text('task = "from a file"\nmodel = { kind = "echo" }\n')
    done = invoke("run", "--config", tmp_path / "c.toml", "--docs", tmp_path / "docs", "--out", tmp_path / "r",
                  "--tools.workspace=true", "--json")  # fmt: skip
    assert json.loads(done.stdout)["text"] == "from a file"
    (start,) = [e for e in read_events(tmp_path / "r" / "events.jsonl") if e.kind == "swarm.start"]
    assert {"search", "open", "write_file"} <= set(start.data["tools"])


def test_ctrl_c_is_acknowledged_at_once_and_the_run_resumes(tmp_path):
    slow = "wide:entities=8,attributes=1,latency.model=0.4,latency.search=0.1,latency.open=0.1"
    command = [sys.executable, "-m", "triscale.cli.swarm", "run", "--world", slow, "--out", str(tmp_path / "r"),
               "--limits.concurrent=2"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "r" / "events.jsonl"
    while not log.exists() or log.read_bytes().count(b'"task.end"') < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping 2 agents" in said and "continue with: triscale swarm resume" in said
    ends = {e.data["task"]: e.data["outcome"] for e in read_events(log) if e.kind == "task.end"}
    assert len(ends) == 8 and set(ends.values()) == {"completed", "cancelled", "not_started"}
    report = json.loads(invoke("resume", tmp_path / "r", "--json").stdout)
    assert report["outcomes"] == {"completed": 8} and report["score"]["success"] == 1.0
    starts = [e.data["task"] for e in read_events(log) if e.kind == "task.start"]
    assert all(starts.count(task) == 1 for task, outcome in ends.items() if outcome == "completed")


def test_the_live_tree_shows_states_tokens_and_limits(tmp_path):
    done = invoke("run", *WORLD, "--virtual", "--out", tmp_path / "r", "--limits.concurrent=2", "--quiet")
    assert done.exit_code == 0
    from rich.console import Console

    state, seen = LiveState(), []
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for event in read_events(tmp_path / "r" / "events.jsonl"):
        state.take(event.model_dump())
        if event.kind == "tool.call":
            console.print(state.tree())
            seen.append(console.export_text())
    assert any("2 running, 4 queued, 0 ended" in text for text in seen)
    assert any("✓ t1." in text and "step 1 search" in text for text in seen)
    assert "critical steps 4" in seen[-1]  # the stage is not over, but its longest sub-agent is at its third step
    assert state.peak == 2 and state.critical_so_far == 4 and state.ended.total() == 6 and not state.tasks


def test_off_a_terminal_failures_get_a_plain_line(capsys):
    view = LiveView(sys.stdout)
    view.take({"time": 0.0, "kind": "task.assign", "data": {"task": "t1.0", "agent": "w", "prompt": "p"}})
    end = {
        "task": "t1.0",
        "agent": "w",
        "outcome": "timed_out",
        "reason": "task_seconds = 5",
        "steps": 1,
        "seconds": 5.0,
    }
    view.take({"time": 1.0, "kind": "task.end", "data": end})
    assert capsys.readouterr().out == "⌛ t1.0 w: timed_out (task_seconds = 5)\n"


def test_silence_is_broken_by_a_line(capsys, monkeypatch):
    monkeypatch.setattr(live, "LINE_SECONDS", 0.01)
    monkeypatch.setattr(live, "SILENCE_SECONDS", 0.02)
    view = LiveView(sys.stdout)

    async def main():
        view.take({"time": clock.timestamp() - 65.0, "kind": "swarm.start", "data": {"mode": "swarm"}})
        heart = asyncio.create_task(view.heartbeat())
        while "turn 0" not in capsys.readouterr().out:
            await asyncio.sleep(0.01)
        heart.cancel()

    clock.run(main())
    assert 65.0 <= view.state.now - view.state.started < 1000
