"""Chaos and resume: whatever fails, each assignment has one outcome, totals add up, and nothing is paid for twice."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triscale.events import read_events
from triscale.swarm import clock
from triscale.swarm.client_chaos import Chaos, ChaosClient
from triscale.swarm.client_scripted import PolicyClient, act, call, say
from triscale.swarm.limits import Limits
from triscale.swarm.orchestrator import Swarm
from triscale.swarm.resume import Recorded, conversation
from triscale.swarm.types import ModelError, Outcome, ToolResult, Usage

OUTCOMES = {str(outcome) for outcome in Outcome}


class Counting:
    name, description, timeout, parameters = "work", "Work.", None, {"type": "object"}

    def __init__(self, misbehave=False):
        self.misbehave = misbehave

    async def call(self, arguments, context):
        await asyncio.sleep(arguments.get("seconds", 1.0))
        if self.misbehave and arguments.get("seconds", 0) > 2:
            raise OSError("broken tool")
        return ToolResult(f"{context.agent} worked")

    async def close(self):
        pass


class Paid:
    """Counts the replies that were given (and so paid for) by agent and step, across sessions."""

    def __init__(self, inner, counter):
        self.inner, self.counter = inner, counter
        self.name, self.endpoint, self.context_window = inner.name, inner.endpoint, inner.context_window

    async def complete(self, request):
        reply = await self.inner.complete(request)
        self.counter[request.agent, request.step] += 1
        return reply

    async def close(self):
        pass


def orchestrator(turns, width):
    def policy(request):
        if request.step <= turns:
            first = [call("create_subagent", {"name": "w", "system_prompt": "s"})] if request.step == 1 else []
            batch = [call("assign_task", {"agent": "w", "prompt": f"{request.step}.{i}"}) for i in range(width)]
            return act(*first, call("work", {"seconds": 0.5}), *batch)
        return say("answer")

    return policy


def subagent(request):
    steps = 1 + int(request.messages[1].content.split(".")[1]) % 3
    if request.step <= steps:
        return act(call("work", {"seconds": request.step * 1.0}), content="so far")
    return say("did " + request.messages[1].content)


def events_of(path):
    return [event for event in read_events(path / "events.jsonl")]


def check_log(events, result):
    """The invariants every log must keep, however the run went."""
    data = lambda kind: [event.data for event in events if event.kind == kind]
    assigned = [d["task"] for d in data("task.assign")]
    assert len(assigned) == len(set(assigned))
    last = {d["task"]: d for d in data("task.end")}
    assert set(last) == set(assigned)
    assert {d["outcome"] for d in last.values()} <= OUTCOMES
    assert sum(result.outcomes.values()) == len(last)
    assert Counter(d["outcome"] for d in last.values()) == Counter(result.outcomes)
    for d in last.values():
        assert (d["outcome"] == "completed") == (d["reason"] == ""), d
    replies = data("model.reply")
    for field in ("tokens_in", "tokens_out", "tokens_cached"):
        assert sum(d[field] for d in replies) == getattr(result.usage, field)
    for kind, end in (("model.call", "model.reply"), ("tool.call", "tool.result")):
        assert Counter(d["call"] for d in data(kind)) == Counter(d["call"] for d in data(end) if "task" not in d) + (
            Counter(d["call"] for d in data(kind) if d.get("name") == "assign_task"
                    and any(r["call"] == d["call"] and "task" in r for r in data(end)))
        )  # fmt: skip


kinds = st.sampled_from(Chaos.kinds())
chaos = st.dictionaries(kinds, st.floats(0.02, 0.25), max_size=4).map(lambda d: Chaos(**d, delay=2.0))


@given(main=chaos, sub=chaos, seed=st.integers(0, 999), width=st.integers(1, 6), turns=st.integers(1, 3),
       concurrent=st.integers(1, 4), cancel=st.none() | st.floats(0, 40), tokens=st.none() | st.integers(500, 20000),
       wall=st.none() | st.floats(1, 60), depth=st.integers(1, 2))  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_chaos(tmp_path_factory, main, sub, seed, width, turns, concurrent, cancel, tokens, wall, depth):
    """Any mix of failures, with limits and a cancellation on top; then resumed without chaos until it completes."""
    directory = tmp_path_factory.mktemp("run")
    paid: Counter = Counter()

    def make(chaotic, limits):
        client, child = PolicyClient(orchestrator(turns, width), latency=0.3), PolicyClient(subagent, latency=0.7)
        if chaotic:
            client, child = ChaosClient(client, main, seed), ChaosClient(child, sub, seed + 1)
        return Swarm(client=Paid(client, paid), subagent_client=Paid(child, paid), tools=[Counting(chaotic)],
                     directory=directory, limits=limits)  # fmt: skip

    async def session(swarm, cancel):
        before = asyncio.all_tasks()
        task = asyncio.create_task(swarm.run("q"))
        if cancel is not None:
            await asyncio.sleep(cancel)
            asked = clock.now()
            swarm.cancel()
            result = await task
            assert clock.now() <= asked + 2 * swarm.limits.grace_seconds
        else:
            result = await task
        alive = asyncio.all_tasks() - before
        assert len(alive) <= len(result.abandoned), alive
        return result

    limits = Limits(concurrent=concurrent, depth=depth, tokens=tokens, wall_seconds=wall, model_seconds=30,
                    task_seconds=100, subagent_steps=6, orchestrator_steps=6)  # fmt: skip
    result = clock.run(session(make(True, limits), cancel), virtual=True)
    check_log(events_of(directory), result)

    given_before = Counter(paid)
    again = clock.run(session(make(False, Limits(concurrent=concurrent)), None), virtual=True)
    events = events_of(directory)
    check_log(events, again)
    assert again.usage.tokens >= result.usage.tokens
    if result.outcome == Outcome.COMPLETED:
        assert paid == given_before and again.text == result.text  # a finished run costs nothing
    elif result.outcome != Outcome.FAILED:
        assert again.outcome == Outcome.COMPLETED
    first = itertools.takewhile(lambda event: event.kind != "swarm.resume", events)
    usable = Recorded.load(first).replies
    assert not {key: n for key, n in (paid - given_before).items() if f"{key[0]}#{key[1]}" in usable}


def test_quota_keeps_finished_work_and_marks_the_rest(tmp_path):
    """Case: quota ends in the middle of a batch of 13; only the unfinished run again."""
    paid: Counter = Counter()
    budget = {"left": 5}

    def limited(request):
        if budget["left"] == 0:
            raise ModelError("quota", "403 insufficient_quota", status=403)
        budget["left"] -= 1
        return say("did " + request.messages[1].content)

    def make(policy):
        return Swarm(client=PolicyClient(orchestrator(1, 13)), directory=tmp_path, tools=[Counting()],
                     subagent_client=Paid(PolicyClient(policy, latency=1.0, endpoint="sub"), paid),
                     limits=Limits(concurrent=2))  # fmt: skip

    swarm = make(limited)
    result = clock.run(swarm.run("q"), virtual=True)
    assert (result.outcome, result.limit) == (Outcome.LIMIT, "quota")
    assert result.outcomes["completed"] == 5 and result.outcomes["not_started"] >= 6
    assert sum(result.outcomes.values()) == 13 and str(tmp_path) in result.resume_command
    assert any(e.kind == "limiter" and e.data["event"] == "closed" for e in events_of(tmp_path))

    budget["left"] = 100
    again = clock.run(make(limited).run("q"), virtual=True)
    assert again.outcome == Outcome.COMPLETED and again.outcomes == {"completed": 13}
    assert set(paid.values()) == {1} and len(paid) == 13


def test_limits_raised_on_resume_continue_where_the_run_stopped(tmp_path):
    paid: Counter = Counter()

    def session(limits):
        client = Paid(PolicyClient(orchestrator(2, 3)), paid)
        child = Paid(PolicyClient(subagent), paid)
        swarm = Swarm(client=client, subagent_client=child, tools=[Counting()], directory=tmp_path, limits=limits)
        return clock.run(swarm.run("q"), virtual=True)

    first = session(Limits(wall_seconds=2.5))
    assert first.outcome == Outcome.LIMIT and first.seconds == 2.5
    second = session(Limits())
    assert second.outcome == Outcome.COMPLETED and second.outcomes == {"completed": 6}
    assert set(paid.values()) == {1}
    assert second.usage.tokens == sum(e.data["tokens_in"] + e.data["tokens_out"] for e in events_of(tmp_path)
                                      if e.kind == "model.reply")  # fmt: skip


def test_an_interrupted_tool_call_runs_again_and_a_finished_one_does_not(tmp_path):
    seen, ran = [], []

    class Tool(Counting):
        async def call(self, arguments, context):
            ran.append(arguments["seconds"])
            return await super().call(arguments, context)

    def main(request):
        if request.step == 1:
            return act(call("work", {"seconds": 1.0}), call("work", {"seconds": 9.0}))
        seen.extend(m.content for m in request.messages if m.role == "tool")
        return say("done")

    for wall in (5.0, None):
        swarm = Swarm(client=PolicyClient(main), tools=[Tool()], directory=tmp_path, limits=Limits(wall_seconds=wall))
        result = clock.run(swarm.run("q"), virtual=True)
    assert result.outcome == Outcome.COMPLETED and result.seconds == 5.0 + 9.0
    assert seen == ["main worked", "main worked"] and ran == [1.0, 9.0, 9.0]


def test_the_conversation_can_be_rebuilt_from_the_log(tmp_path):
    seen = {}

    def watch(policy):
        return lambda request: seen.__setitem__(request.agent, list(request.messages)) or policy(request)

    swarm = Swarm(client=PolicyClient(watch(orchestrator(2, 2))), subagent_client=PolicyClient(watch(subagent)),
                  tools=[Counting()], directory=tmp_path, limits=Limits(subagent_steps=2))  # fmt: skip
    clock.run(swarm.run("q"), virtual=True)
    assert "one turn is left" in seen["t2.1"][-1].content
    for agent in ("main", "t1.0", "t2.1"):
        rebuilt = conversation(events_of(tmp_path), agent)
        assert rebuilt[: len(seen[agent])] == seen[agent]


def test_another_task_in_the_same_folder_is_refused(tmp_path):
    clock.run(Swarm(client=PolicyClient(lambda r: say("x")), directory=tmp_path).run("one"), virtual=True)
    with pytest.raises(Exception, match="another task"):
        clock.run(Swarm(client=PolicyClient(lambda r: say("x")), directory=tmp_path).run("two"), virtual=True)


PROGRAM = textwrap.dedent("""
    import asyncio, json, sys
    from pathlib import Path
    from triscale.swarm import clock
    from triscale.swarm.client_scripted import PolicyClient, act, call, say
    from triscale.swarm.limits import Limits
    from triscale.swarm.orchestrator import Swarm
    paid = open(sys.argv[2], "a", buffering=1)
    def main(request):
        if request.step == 1:
            return act(call("create_subagent", {"name": "w", "system_prompt": ""}),
                       *(call("assign_task", {"agent": "w", "prompt": str(i)}) for i in range(12)))
        return say("answer")
    async def sub(request):
        await asyncio.sleep(0.25)
        paid.write(request.agent + "\\n")
        return say("did " + request.messages[1].content)
    swarm = Swarm(client=PolicyClient(main), subagent_client=PolicyClient(sub), directory=Path(sys.argv[1]),
                  limits=Limits(concurrent=2))
    result = clock.run(swarm.run("q"))
    print(json.dumps(result.outcomes), result.outcome)
""")


def test_a_killed_process_resumes_without_paying_again(tmp_path):
    """SIGKILL in the middle of a batch; the second process pays only for what had not ended."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "run"), str(tmp_path / "paid")]
    first = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    log = tmp_path / "run" / "events.jsonl"
    try:
        while not log.exists() or log.read_bytes().count(b'"task.end"') < 4:
            assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    ended = {e.data["task"] for e in read_events(log) if e.kind == "task.end"}
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert '{"completed": 12} completed' in done.stdout
    paid = Counter((tmp_path / "paid").read_text().split())
    assert len(ended) >= 4 and all(paid[task] == 1 for task in ended)
    assert len(paid) == 12


def test_usage_adds_up():
    assert Usage(1, 2, 3, 0.5) + Usage(10, 20, 30, 1.5) == Usage(11, 22, 33, 2.0)
    assert json.dumps({"outcome": Outcome.LIMIT}) == '{"outcome": "limit"}'
