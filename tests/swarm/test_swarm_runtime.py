"""Swarm runs under the virtual clock: what runs at the same time, what each limit stops, what the parent is told."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from triscale.swarm import clock
from triscale.swarm.client_scripted import PolicyClient, ScriptedClient, act, call, say
from triscale.swarm.limiter import Limiters
from triscale.swarm.limits import Limits
from triscale.swarm.orchestrator import Swarm
from triscale.swarm.types import Message, ModelError, ModelReply, Outcome, ToolResult, Usage


class Sleeper:
    """A tool that takes as long as it is told."""

    name, description, timeout = "wait", "Wait.", None
    parameters = {"type": "object", "properties": {"seconds": {"type": "number"}}}

    def __init__(self, timeout=None):
        self.timeout = timeout
        self.now = self.peak = self.calls = 0

    async def call(self, arguments, context):
        self.calls += 1
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            await asyncio.sleep(arguments.get("seconds", 1.0))
        finally:
            self.now -= 1
        return ToolResult(f"waited {arguments.get('seconds', 1.0)}", evidence=("clock",))

    async def close(self):
        pass


def fan_out(prompts, then=lambda request: say("done")):
    """An orchestrator that creates one sub-agent, assigns every prompt at once, then answers."""

    def policy(request):
        if request.step == 1:
            return act(call("create_subagent", {"name": "w", "system_prompt": "work"}),
                       *(call("assign_task", {"agent": "w", "prompt": p}) for p in prompts))  # fmt: skip
        return then(request)

    return policy


def working(steps=1, seconds=1.0):
    """A sub-agent that waits ``steps`` times, then says its prompt back."""

    def policy(request):
        if request.step <= steps:
            return act(call("wait", {"seconds": seconds}))
        return say("did " + request.messages[1].content)

    return policy


def run(client, sub, *, tools=(), question="q", **options):
    swarm = Swarm(client=client, subagent_client=sub, tools=tools, **options)
    result = clock.run(swarm.run(question), virtual=True)
    return swarm, result


def events(swarm, kind):
    return [event["data"] for event in swarm.log.events if event["kind"] == kind]


def tool_texts(request):
    return [m.content for m in request.messages if m.role == "tool"]


def test_assignments_of_one_turn_take_the_longest_not_the_sum():
    seen = []
    main = PolicyClient(fan_out([str(i) for i in range(10)], lambda r: seen.extend(tool_texts(r)) or say("all")))
    sub = PolicyClient(lambda r: act(call("wait", {"seconds": int(r.messages[1].content) + 1})) if r.step == 1
                       else say("did " + r.messages[1].content))  # fmt: skip
    tool = Sleeper()
    swarm, result = run(main, sub, tools=[tool])
    assert (result.outcome, result.text, result.seconds) == (Outcome.COMPLETED, "all", 10.0)
    assert tool.peak == 10
    assert seen[1:] == [f"did {i}" for i in range(10)]  # in call order, though the first ended first
    assert not result.partial and result.outcomes == {"completed": 10}
    ends = events(swarm, "task.end")
    assert [e["task"] for e in ends] == [f"t1.{i}" for i in range(10)] and ends[3]["seconds"] == 4.0


def test_a_thousand_subagents_share_the_slots_exactly():
    main = PolicyClient(fan_out([str(i) for i in range(1000)]), context_window=10**6)
    tool = Sleeper()
    swarm, result = run(main, PolicyClient(working(2, 5.0)), tools=[tool], limits=Limits(concurrent=200))
    assert result.seconds == 5 * 2 * 5.0  # five waves of two waits
    assert tool.peak == 200 and result.outcomes == {"completed": 1000}
    waits = sorted({round(e["queue_seconds"], 6) for e in events(swarm, "task.end")})
    assert waits == [0.0, 10.0, 20.0, 30.0, 40.0]


@pytest.mark.parametrize("counting, expected", [("turns", 1 + 4), ("calls", 1 + 1 + 1 + 4)])
def test_critical_steps_follow_the_stated_counting(counting, expected):
    """One stage: the orchestrator's turn and the longest sub-agent (three waits and its final message)."""
    main = PolicyClient(lambda r: act(call("create_subagent", {"name": "w", "system_prompt": ""}),
                                      call("wait", {"seconds": 1}),
                                      call("assign_task", {"agent": "w", "prompt": "1"}),
                                      call("assign_task", {"agent": "w", "prompt": "3"}))
                        if r.step == 1 else say("x"))  # fmt: skip
    sub = PolicyClient(lambda r: act(call("wait")) if r.step <= int(r.messages[1].content) else say("ok"))
    swarm, result = run(main, sub, tools=[Sleeper()], limits=Limits(counting=counting))
    assert result.critical_steps == expected
    assert events(swarm, "stage")[0]["sub_steps"] == [2, 4]


def test_serial_work_costs_one_critical_step_a_call():
    main = PolicyClient(lambda r: act(call("wait")) if r.step <= 5 else say("x"))
    _, result = run(main, None, tools=[Sleeper()], mode="single")
    assert result.critical_steps == 5 and result.seconds == 5.0


def test_contexts_are_private_and_fresh():
    prompts = []

    def sub(request):
        prompts.append([(m.role, m.content) for m in request.messages][1:])
        return say("ok")

    _, result = run(PolicyClient(fan_out(["a", "b"])), PolicyClient(sub))
    assert result.outcome == Outcome.COMPLETED
    assert prompts == [[("user", "a")], [("user", "b")]]


def test_subagents_cannot_spawn_by_default_and_can_when_depth_allows():
    offered = []

    def sub(request):
        offered.append({spec.name for spec in request.tools})
        if request.agent.count("/") == 0 and len(offered) and "create_subagent" in offered[-1] and request.step == 1:
            return act(call("create_subagent", {"name": "leaf", "system_prompt": ""}),
                       call("assign_task", {"agent": "leaf", "prompt": "deep"}))  # fmt: skip
        return say("ok")

    run(PolicyClient(fan_out(["a"])), PolicyClient(sub))
    assert offered == [set()]
    offered.clear()
    swarm, result = run(PolicyClient(fan_out(["a", "b"])), PolicyClient(sub), limits=Limits(depth=2, concurrent=1))
    assert result.outcomes == {"completed": 4}  # one slot is enough: a waiting parent lends its own
    assert {e["task"] for e in events(swarm, "task.end")} == {"t1.0/t1.0", "t1.0", "t1.1/t1.0", "t1.1"}
    assert {e["task"]: e["critical_steps"] for e in events(swarm, "task.end")}["t1.0"] == 1 + 1 + 1
    assert [e["sub_steps"] for e in events(swarm, "stage") if e["agent"] == "main"] == [[3, 3]]
    assert offered.count(set()) == 2  # the leaves


def test_one_failure_loses_nothing_of_the_siblings():
    def sub(request):
        if request.messages[1].content == "2":
            raise ModelError("bad_request", "no")
        if request.messages[1].content == "3":
            raise ZeroDivisionError("bug")
        return say("fine " + request.messages[1].content)

    seen = []
    main = PolicyClient(fan_out(list("01234"), lambda r: seen.extend(tool_texts(r)) or say("done")))
    _swarm, result = run(main, PolicyClient(sub))
    assert result.outcomes == {"completed": 3, "failed": 2} and result.partial
    assert seen[1] == "fine 0" and seen[3].startswith("[w t1.2: failed: bad_request: no]") and "ZeroDivision" in seen[4]
    assert result.outcome == Outcome.COMPLETED


def test_step_limit_is_an_outcome_of_its_own_and_the_parent_sees_it():
    def sub(request):
        return act(call("wait"), content=f"thinking {request.step}")

    seen, limits = [], Limits(subagent_steps=3)
    main = PolicyClient(fan_out(["a"], lambda r: seen.extend(tool_texts(r)) or say("done")))
    swarm, _result = run(main, PolicyClient(sub), tools=[Sleeper()], limits=limits)
    (end,) = events(swarm, "task.end")
    assert (end["outcome"], end["limit"], end["steps"]) == ("limit", "subagent_steps", 3)
    assert "limit: subagent_steps = 3 reached" in seen[1] and "thinking 3" in seen[1]
    assert any(e["limit"] == "subagent_steps" and e["scope"] == "t1.0" for e in events(swarm, "limit"))


def test_the_agent_is_told_its_limits_and_its_last_turn():
    requests = []

    def sub(request):
        requests.append(request)
        return act(call("wait")) if request.step < 2 else say("ok")

    run(PolicyClient(fan_out(["a"])), PolicyClient(sub), tools=[Sleeper()], limits=Limits(subagent_steps=2))
    assert "2 turns" in requests[0].messages[0].content
    assert "one turn is left" in requests[1].messages[-1].content


def test_orchestrator_step_limit():
    main = PolicyClient(lambda r: act(call("wait"), content="so far"))
    _swarm, result = run(main, None, tools=[Sleeper()], limits=Limits(orchestrator_steps=4))
    assert (result.outcome, result.limit, result.text, result.steps) == (
        Outcome.LIMIT,
        "orchestrator_steps",
        "so far",
        4,
    )


def test_critical_steps_limit_caps_children_too():
    main = PolicyClient(fan_out(["a"], lambda r: act(call("wait"))))
    swarm, result = run(main, PolicyClient(lambda r: act(call("wait"))), tools=[Sleeper()],
                        limits=Limits(critical_steps=6))  # fmt: skip
    (end,) = events(swarm, "task.end")
    assert (end["steps"], end["limit"]) == (5, "critical_steps")
    assert (result.outcome, result.limit, result.critical_steps) == (Outcome.LIMIT, "critical_steps", 6)


def test_total_cap_names_every_refused_assignment():
    swarm, result = run(PolicyClient(fan_out(list("abcde"))), PolicyClient(working(0)), limits=Limits(total=3))
    assert result.outcomes == {"completed": 3, "not_started": 2}
    refused = [e for e in events(swarm, "task.end") if e["outcome"] == "not_started"]
    assert [e["task"] for e in refused] == ["t1.3", "t1.4"] and all(e["limit"] == "total" for e in refused)


def test_token_limit_stops_before_the_next_call():
    def reply(request):
        return act(call("wait")) if request.step < 50 else say("x")

    _swarm, result = run(PolicyClient(reply), None, tools=[Sleeper()], limits=Limits(tokens=5000))
    assert (result.outcome, result.limit) == (Outcome.LIMIT, "tokens")
    assert result.usage.tokens <= 5000


def test_cost_limit():
    main = PolicyClient(lambda r: act(call("wait")), prices=(1.0, 1.0, 0.1))
    _swarm, result = run(main, None, tools=[Sleeper()], limits=Limits(cost=0.01))
    assert (result.outcome, result.limit) == (Outcome.LIMIT, "cost")
    assert 0.01 <= result.usage.cost < 0.02


def test_wall_limit_ends_everything_at_that_second_with_partial_results():
    main = PolicyClient(fan_out(["0", "1", "2"]))
    sub = PolicyClient(lambda r: say("quick") if r.messages[1].content == "0" else act(call("wait", {"seconds": 100})))
    limits = Limits(wall_seconds=30, concurrent=2)
    _swarm, result = run(main, sub, tools=[Sleeper()], limits=limits)
    assert (result.outcome, result.limit, result.seconds) == (Outcome.LIMIT, "wall_seconds", 30.0)
    assert result.outcomes == {"completed": 1, "limit": 2}


def test_task_deadline_counts_run_time_not_queueing():
    main = PolicyClient(fan_out(list("abcdef")))
    limits = Limits(concurrent=1, task_seconds=11)
    swarm, result = run(main, PolicyClient(working(1, 10.0)), tools=[Sleeper()], limits=limits)
    assert result.outcomes == {"completed": 6} and result.seconds == 60.0
    swarm, result = run(main, PolicyClient(working(1, 12.0)), tools=[Sleeper()], limits=limits)
    assert result.outcomes == {"timed_out": 6} and result.seconds == 66.0
    assert events(swarm, "task.end")[0]["reason"] == "task_seconds = 11 of run time used up"


def test_tool_timeout_is_reported_to_the_model_and_the_agent_goes_on():
    seen = []
    main = PolicyClient(lambda r: act(call("wait", {"seconds": 100})) if r.step == 1
                        else seen.extend(tool_texts(r)) or say("x"))  # fmt: skip
    swarm, result = run(main, None, tools=[Sleeper(timeout=7.0)])
    assert seen == ["Error: wait did not finish within 7 s"] and result.seconds == 7.0
    assert events(swarm, "tool.result")[0]["outcome"] == "timed_out"


def test_a_hanging_model_times_out():
    async def hang(request):
        await asyncio.get_running_loop().create_future()

    swarm, _result = run(PolicyClient(fan_out(["a"])), PolicyClient(hang), limits=Limits(model_seconds=20))
    (end,) = events(swarm, "task.end")
    assert end["outcome"] == "timed_out" and "model_seconds = 20" in end["reason"]
    assert end["seconds"] == 40.0  # two attempts; the pause between them is not run time


@pytest.mark.parametrize("at", [0.0, 0.5, 3.0, 9.0])
def test_cancel_ends_every_descendant_in_bounded_time(at):
    tool = Sleeper()
    swarm = Swarm(client=PolicyClient(fan_out(list("abcdef"))), subagent_client=PolicyClient(working(3, 2.5)),
                  tools=[tool], limits=Limits(concurrent=2))  # fmt: skip

    async def scenario():
        running = asyncio.create_task(swarm.run("q"))
        await asyncio.sleep(at)
        swarm.cancel()
        result = await running
        return result, len(asyncio.all_tasks()), clock.now()

    result, alive, ended = clock.run(scenario(), virtual=True)
    assert (result.outcome, alive, ended, tool.now) == (Outcome.CANCELLED, 1, at, 0)
    ends = events(swarm, "task.end")
    if at > 0:
        assert len(ends) == 6 == sum(result.outcomes.values())
        assert result.outcomes["not_started"] == (2 if at == 9.0 else 4)
    for kind in ("model", "tool"):
        begun = [e["call"] for e in events(swarm, f"{kind}.call")]
        ended = [e["call"] for e in events(swarm, f"{kind}.{'reply' if kind == 'model' else 'result'}")]
        assert sorted(begun) == sorted(ended)


def test_a_tool_that_ignores_cancellation_is_abandoned_and_named():
    class Stubborn(Sleeper):
        async def call(self, arguments, context):
            for _ in range(3):
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
            return ToolResult("never mind")

    swarm = Swarm(client=PolicyClient(fan_out(["a", "b"])), subagent_client=PolicyClient(working()), tools=[Stubborn()],
                  limits=Limits(grace_seconds=5))  # fmt: skip

    async def scenario():
        running = asyncio.create_task(swarm.run("q"))
        await asyncio.sleep(1.0)
        swarm.cancel()
        return await running, clock.now()

    result, ended = clock.run(scenario(), virtual=True)
    assert ended == 6.0 and tuple(sorted(result.abandoned)) == ("t1.0 tool wait", "t1.1 tool wait")
    assert len(events(swarm, "warning")) == 2


def test_one_member_is_stopped_by_id_and_the_others_finish():
    swarm = Swarm(client=PolicyClient(fan_out(list("abc"))), subagent_client=PolicyClient(working(1, 4.0)),
                  tools=[Sleeper()], limits=Limits(concurrent=2))  # fmt: skip

    async def scenario():
        running = asyncio.create_task(swarm.run("q"))
        await asyncio.sleep(1.0)
        assert swarm.cancel_task("t1.0", "not needed") and swarm.cancel_task("t1.2") and not swarm.cancel_task("t9.9")
        return await running

    result = clock.run(scenario(), virtual=True)
    assert result.outcome == Outcome.COMPLETED
    outcomes = {e["task"]: e["outcome"] for e in events(swarm, "task.end")}
    assert outcomes == {"t1.0": "cancelled", "t1.1": "completed", "t1.2": "not_started"}


def test_external_cancellation_passes_through_after_everything_ended():
    tool = Sleeper()
    swarm = Swarm(client=PolicyClient(fan_out(["a"])), subagent_client=PolicyClient(working(1, 9.0)), tools=[tool])

    async def scenario():
        running = asyncio.create_task(swarm.run("q"))
        await asyncio.sleep(1.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return tool.now

    assert clock.run(scenario(), virtual=True) == 0
    assert events(swarm, "result")[0]["outcome"] == "cancelled"


def test_results_are_cut_to_the_context_and_readable_by_handle():
    long = "".join(f"line {i}\n" for i in range(5000))
    seen = []

    def main(request):
        if request.step == 1:
            return act(call("create_subagent", {"name": "w", "system_prompt": ""}),
                       *(call("assign_task", {"agent": "w", "prompt": str(i)}) for i in range(4)))  # fmt: skip
        seen.append(tool_texts(request))
        if request.step == 2:
            return act(call("read_result", {"handle": "result:t1.2", "offset": 30000, "length": 50}))
        return say("done")

    client = PolicyClient(main, context_window=8000)
    swarm, result = run(client, PolicyClient(lambda r: say(long)))
    assert result.outcome == Outcome.COMPLETED
    assert all(len(text) < 8000 * 3.5 / 6 for text in seen[0]) and 'read_result(handle="result:t1.2"' in seen[0][3]
    assert seen[1][-1] == f"[characters 30000 to 30050 of {len(long)}]\n{long[30000:30050]}"
    assert events(swarm, "task.end")[0]["result"] == long


def test_a_full_context_is_a_limit_not_a_crash():
    main = PolicyClient(lambda r: act(call("wait"), content="x" * 2000), context_window=4000)
    _swarm, result = run(main, None, tools=[Sleeper()])
    assert (result.outcome, result.limit) == (Outcome.LIMIT, "context")


def test_malformed_and_unknown_calls_get_an_answer_each():
    seen = []

    def main(request):
        if request.step == 1:
            return act(call("wait", "{bad"), call("nothing"), call("assign_task", {"agent": "ghost", "prompt": "x"}),
                       call("create_subagent", {"name": 3}), call("wait", "[1]"))  # fmt: skip
        seen.extend((m.tool_call_id, m.content) for m in request.messages if m.role == "tool")
        return say("done")

    _swarm, _result = run(PolicyClient(main), None, tools=[Sleeper()])
    assert [id for id, _ in seen] == ["functions.wait:0", "functions.nothing:1", "functions.assign_task:2",
                                      "functions.create_subagent:3", "functions.wait:4"]  # fmt: skip
    assert all(text.startswith("Error: ") for _, text in seen)
    assert "no sub-agent is called 'ghost'" in seen[2][1] and "your tools:" in seen[1][1]


def test_given_ids_are_kept_and_repeated_ones_made_unique():
    seen = []

    def main(request):
        if request.step == 1:
            return act(call("wait", id="functions.wait:7"), call("wait", id="functions.wait:7"))
        seen.extend(m.tool_call_id for m in request.messages if m.role == "tool")
        return say("done")

    run(PolicyClient(main), None, tools=[Sleeper()])
    assert seen == ["functions.wait:7", "functions.wait:7'"]


def test_calls_over_the_cap_get_an_error_result():
    seen = []
    main = PolicyClient(lambda r: act(*[call("wait")] * 5) if r.step == 1 else seen.extend(tool_texts(r)) or say("x"))
    tool = Sleeper()
    run(main, None, tools=[tool], limits=Limits(calls_per_turn=3))
    assert tool.calls == 3 and sum("calls_per_turn = 3" in text for text in seen) == 2


def test_empty_reply_is_asked_again_once_then_fails():
    empty = ModelReply(Message("assistant", " "))
    _, result = run(ScriptedClient([empty, say("now")]), None)
    assert result.text == "now"
    _, result = run(ScriptedClient([empty, empty]), None)
    assert result.outcome == Outcome.FAILED and "two replies without text" in result.reason


def test_a_cut_final_message_is_not_a_completion():
    cut = ModelReply(Message("assistant", "half a sent"), "length")
    _, result = run(ScriptedClient([cut]), None)
    assert (result.outcome, result.limit, result.text) == (Outcome.LIMIT, "reply_tokens", "half a sent")


def test_last_result_block_alone_reaches_the_parent():
    seen = []
    main = PolicyClient(fan_out(["a"], lambda r: seen.extend(tool_texts(r)) or say("x")))
    run(main, PolicyClient(lambda r: say("noise <result>old</result> <result> 42 </result> bye")))
    assert seen[1] == "42"


def test_recreating_a_name_replaces_it_for_later_assignments():
    systems = []

    def main(request):
        if request.step <= 2:
            return act(call("create_subagent", {"name": "w", "system_prompt": f"v{request.step}"}),
                       call("assign_task", {"agent": "w", "prompt": "x"}))  # fmt: skip
        return say("done")

    swarm, _ = run(PolicyClient(main), PolicyClient(lambda r: systems.append(r.messages[0].content[:2]) or say("ok")))
    assert systems == ["v1", "v2"]
    assert [e["replaces"] for e in events(swarm, "agent.create")] == [False, True]


def test_totals_are_the_sum_of_the_leaves():
    swarm, result = run(PolicyClient(fan_out(list("abc"))), PolicyClient(working(2)), tools=[Sleeper()])
    replies = events(swarm, "model.reply")
    assert result.usage.tokens_in == sum(e["tokens_in"] for e in replies)
    children = sum(e["total_tokens"] for e in events(swarm, "task.end"))
    own = sum(e["tokens_in"] + e["tokens_out"] for e in replies if e["agent"] == "main")
    assert children + own == result.usage.tokens
    assert all(json.dumps(event) for event in swarm.log.events)


def test_a_server_that_reports_no_usage_is_counted_by_estimate_and_named():
    class Silent:
        name, endpoint, context_window = "m", "http://e", None

        async def complete(self, request):
            return act(call("wait"), content="x" * 350)

        async def close(self):
            pass

    swarm, result = run(Silent(), None, tools=[Sleeper()], limits=Limits(tokens=3000))
    assert (result.outcome, result.limit) == (Outcome.LIMIT, "tokens") and 1000 < result.usage.tokens <= 3000
    assert [w["message"][:30] for w in events(swarm, "warning")] == ["http://e reports no token usag"]
    assert all(e["estimated"] for e in events(swarm, "model.reply"))


def test_the_room_loads_neither_torch_nor_an_http_client():
    code = ("import sys; import triscale.swarm.orchestrator, triscale.swarm.config, triscale.swarm.live, "
            "triscale.swarm.client_http; print([m for m in ('torch', 'aiohttp', 'ray', 'openai') if m in sys.modules])")  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_waiting_for_the_rate_limiter_is_not_run_time():
    """Five sub-agents share one place at the endpoint; each has five seconds of its own for its four-second call."""
    main = PolicyClient(fan_out(list("abcde")))
    sub = PolicyClient(lambda r: say("ok"), latency=4.0, endpoint="slow")
    swarm, result = run(main, sub, limits=Limits(task_seconds=5), limiters=Limiters(capacity=1))
    assert result.outcomes == {"completed": 5} and result.seconds == 20.0
    assert sorted(round(e["queue_seconds"]) for e in events(swarm, "task.end")) == [0, 4, 8, 12, 16]


def test_a_stopped_parent_needs_no_slot_to_end_and_gives_none_back_twice():
    """A lends its slot to its child, but B takes it and keeps it: stopping A must not wait for B."""

    def sub(request):
        if request.messages[1].content == "a":
            return act(call("create_subagent", {"name": "leaf", "system_prompt": ""}),
                       call("assign_task", {"agent": "leaf", "prompt": "deep"}))  # fmt: skip
        return act(call("wait", {"seconds": 100})) if request.step == 1 else say("ok")

    swarm = Swarm(client=PolicyClient(fan_out(["a", "b"])), subagent_client=PolicyClient(sub), tools=[Sleeper()],
                  limits=Limits(depth=2, concurrent=1))  # fmt: skip

    async def scenario():
        running = asyncio.create_task(swarm.run("q"))
        await asyncio.sleep(1.0)
        swarm.cancel_task("t1.0")
        return await running, swarm._runtime.slots._value

    result, free = clock.run(scenario(), virtual=True)
    assert (result.outcomes, free) == ({"cancelled": 1, "not_started": 1, "completed": 1}, 1)
    ended = {e["data"]["task"]: e["time"] for e in swarm.log.events if e["kind"] == "task.end"}
    assert ended == {"t1.0/t1.0": 1.0, "t1.0": 1.0, "t1.1": 100.0}


def test_a_swarm_stopped_in_its_callers_task_leaves_that_task_uncancelled():
    swarm = Swarm(client=PolicyClient(fan_out(["a"])), subagent_client=PolicyClient(working(1, 9.0)), tools=[Sleeper()])

    async def scenario():
        asyncio.get_running_loop().call_later(1.0, swarm.cancel)
        result = await swarm.run("q")
        async with asyncio.timeout(5.0):
            await asyncio.sleep(1.0)
        return result.outcome, asyncio.current_task().cancelling()

    assert clock.run(scenario(), virtual=True) == (Outcome.CANCELLED, 0)


def test_failed_attempts_that_were_paid_for_are_counted():
    async def cut(request):
        if cut.left:
            cut.left -= 1
            raise ModelError("transient", "cut", usage=Usage(10, 3))
        return ModelReply(Message("assistant", "x"), usage=Usage(100, 1))

    cut.left = 2
    swarm, result = run(PolicyClient(cut), None)
    assert (
        result.usage
        == Usage(120, 7)
        == Usage(*(events(swarm, "model.reply")[0][k] for k in ("tokens_in", "tokens_out")))
    )
    cut.left = 9
    _, result = run(PolicyClient(cut), None)
    assert (result.outcome, result.usage) == (Outcome.FAILED, Usage(50, 15))


def test_swarms_that_share_a_limiter_both_hear_of_it_and_finish_alone():
    async def busy(request):
        if clock.now() < 1.0:
            raise ModelError("rate_limited", "429", retry_after=3.0)
        return say("ok")

    async def scenario():
        limiters = Limiters(capacity=2)
        swarms = [Swarm(client=PolicyClient(busy), limiters=limiters) for _ in range(3)]
        results = await asyncio.gather(*(swarm.run("q") for swarm in swarms))
        return swarms, results, limiters

    swarms, results, limiters = clock.run(scenario(), virtual=True)
    assert [r.outcome for r in results] == ["completed"] * 3 and limiters.listeners == []
    assert all(events(swarm, "limiter")[0]["event"] == "shrink" for swarm in swarms)
