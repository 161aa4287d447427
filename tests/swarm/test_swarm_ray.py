"""Sub-agents as Ray tasks give the same answer and the same ledger as in one process."""

import asyncio
import json
import threading

import pytest
from click.testing import CliRunner

from triscale.cli.swarm import swarm
from triscale.config import ConfigError
from triscale.events import read_events
from triscale.swarm import clock
from triscale.swarm.config import load_config, prepare
from triscale.swarm.ray_runner import Job, RayRunner, work
from triscale.swarm.resume import Recorded

WORLD = "wide:entities=4,attributes=2,latency.model=0.05,latency.search=0.01,latency.open=0.01"


def job(**over):
    config = load_config(None, {"world": WORLD})
    values = {"config": config, "task": "t1.0", "system_prompt": "", "prompt": config_question(config), "depth": 1,
              "limits": config.limits.for_child(), "max_steps": (20, "subagent_steps"), "recorded": Recorded(),
              "workspace": None}  # fmt: skip
    return Job(**{**values, **over})


def config_question(config):
    from triscale.swarm.worlds import make_world

    return make_world(config.world).question


def test_a_worker_streams_its_events_and_then_its_result():
    """The remote function itself, in this process: needs no Ray."""
    items = list(work(job()))
    assert [kind for kind, _ in items[:-1]] == ["event"] * (len(items) - 1)
    kind, result = items[-1]
    assert kind == "result" and result.outcome == "completed" and result.text.startswith("| Institute |")
    replies = [e["data"] for k, e in items[:-1] if e["kind"] == "model.reply"]
    assert result.usage.tokens_in == sum(r["tokens_in"] for r in replies) and len(replies) == result.steps


def test_abandoning_the_stream_stops_the_agent():
    stream = work(job())
    next(stream)
    stream.close()  # what Ray's cancellation does to the generator
    import threading

    assert not [t for t in threading.enumerate() if "Worker._main" in t.name or ("_main" in t.name and t.is_alive())]


def test_one_that_is_not_stopped_would_be_seen():
    stream = work(job())
    next(stream)
    assert [thread.name for thread in threading.enumerate() if "(_main)" in thread.name]
    stream.close()


def test_spawning_and_virtual_time_are_refused():
    for over in ({"limits": {"depth": 2}}, {"virtual": True}):
        with pytest.raises(ConfigError):
            RayRunner(load_config(None, {"world": WORLD, "ray": True, **over}))


def test_same_answer_and_same_ledger_on_a_local_cluster(tmp_path):
    pytest.importorskip("ray")
    reports = []
    for flags in ((), ("--ray", "--ray_cpus=0.5")):
        folder = tmp_path / f"run{len(reports)}"
        done = CliRunner().invoke(swarm, ["run", "--world", WORLD, "--out", str(folder), "--json", *flags],
                                  catch_exceptions=False)  # fmt: skip
        report = json.loads(done.stdout)
        calls = sorted(e.data["call"] for e in read_events(folder / "events.jsonl") if e.kind == "model.reply")
        ends = sorted((e.data["task"], e.data["outcome"], e.data["steps"], e.data["tokens_in"], e.data["result"])
                      for e in read_events(folder / "events.jsonl") if e.kind == "task.end")  # fmt: skip
        cost = round(report["usage"].pop("cost"), 12)  # summed in another order
        reports.append(
            (report["text"], report["usage"], cost, report["outcomes"], report["critical_steps"], calls, ends)
        )
    assert reports[0] == reports[1]


def test_cancelling_reaches_the_workers(tmp_path):
    pytest.importorskip("ray")
    slow = "wide:entities=3,attributes=1,latency.model=3"
    config = load_config(None, {"world": slow, "ray": True, "limits": {"concurrent": 2}, "ray_cpus": 0.5})

    async def scenario():
        prepared = await prepare(config, tmp_path / "run")
        running = asyncio.create_task(prepared.swarm.run(prepared.task))
        while not any(e.kind == "model.call" and e.data["agent"] == "t1.0" for e in read_events(log)):
            await asyncio.sleep(0.1)
        prepared.swarm.cancel()
        return await asyncio.wait_for(running, 60)

    log = tmp_path / "run" / "events.jsonl"
    log.parent.mkdir()
    log.touch()
    result = clock.run(scenario())
    assert result.outcome == "cancelled" and result.outcomes == {"cancelled": 2, "not_started": 1}
