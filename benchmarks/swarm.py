"""A wide fan-out against a local endpoint of fixed latency: ours beside openai-agents, langgraph and smolagents.

    python benchmarks/swarm.py --json

1,000 sub-agents of four model calls each (three tool turns and a final message), 200 at a time, against an endpoint in
a process of its own that answers every call after 500 ms. ``bound`` is the least possible time at that concurrency
(the orchestrator's two calls, then all sub-agent calls through 200 places) divided by our makespan; peers' ratios are
their makespan divided by ours. Ours runs the orchestrator too, with its log on disk; the peers only fan out, in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CALLS = 4  # of one sub-agent


# -- the endpoint, in a process of its own ----------------------------------------------------------------------------


def serve(latency: float, agents: int) -> None:
    """Answer Chat Completions after ``latency`` seconds; what to answer follows from the request alone."""
    from aiohttp import web

    usage = {"prompt_tokens": 200, "completion_tokens": 20, "total_tokens": 220}

    def body(content: str | None, calls: list[tuple[str, dict]], first: int = 0) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"id": f"functions.{n}:{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
                for i, (n, a) in enumerate(calls, first)
            ]
        finish = "tool_calls" if calls else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "fixed", "usage": usage,
                           "choices": [choice]}).encode()  # fmt: skip

    assign = [("create_subagent", {"name": "w", "system_prompt": "Look things up."})]
    assign += [("assign_task", {"agent": "w", "prompt": f"item {i}"}) for i in range(agents)]
    fan, end = body(None, assign), body("the answer", [])
    look = [body(None, [("lookup", {"key": "x"})], turn) for turn in range(CALLS - 1)]
    end_tool = body(None, [("final_answer", {"answer": "the answer"})], CALLS)  # how smolagents ends a run

    answered = 0

    async def count(request: web.Request) -> web.Response:
        nonlocal answered
        last, answered = answered, 0
        return web.Response(text=str(last))

    async def answer(request: web.Request) -> web.Response:
        nonlocal answered
        answered += 1
        asked = await request.json()
        messages = asked["messages"]
        turns = sum(m["role"] == "assistant" for m in messages)
        tools = {t["function"]["name"] for t in asked.get("tools", ())}
        if "assign_task" in tools and turns == 0:
            reply = fan
        elif "lookup" in tools and "assign_task" not in tools and turns < CALLS - 1:
            reply = look[turns]
        else:
            reply = end_tool if "final_answer" in tools else end
        await asyncio.sleep(latency)
        return web.Response(body=reply, content_type="application/json")

    async def main() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_get("/v1/count", count)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        print(site._server.sockets[0].getsockname()[1], flush=True)  # type: ignore[union-attr]
        await asyncio.Event().wait()

    asyncio.run(main())


# -- ours -------------------------------------------------------------------------------------------------------------


def ours(url: str, options: argparse.Namespace) -> dict[str, float]:
    from triscale.swarm import clock
    from triscale.swarm.client_http import HttpClient
    from triscale.swarm.limits import Limits
    from triscale.swarm.orchestrator import Swarm
    from triscale.swarm.tools import tool

    @tool(thread=False)
    def lookup(key: str) -> str:
        """Look a key up."""
        return f"the value of {key}"

    resident: list[float] = []

    def watch(event: dict[str, Any]) -> None:
        if event["kind"] == "task.end":
            watch.ended += 1  # type: ignore[attr-defined]
            if watch.ended % (options.agents // 5) == 0:  # type: ignore[attr-defined]
                resident.append(resident_mb())

    watch.ended = 0  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(concurrent=options.concurrent, total=options.agents, calls_per_turn=options.agents + 1)
        client = HttpClient.Config(model="fixed", base_url=url, context_window=1_000_000).build()
        swarm = Swarm(client=client, tools=[lookup], limits=limits, directory=Path(folder), listeners=[watch])
        began, cpu = time.perf_counter(), time.process_time()
        result = clock.run(swarm.run("Look all items up."))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert result.outcomes == {"completed": options.agents}, result
    return {"seconds": seconds, "cpu": cpu, "calls": options.agents * CALLS + 2,
            "mb_at_fifth": resident[0], "mb_at_end": resident[-1]}  # fmt: skip


def resident_mb() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:  # no /proc: the peak is the best there is
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- peers ------------------------------------------------------------------------------------------------------------


def openai_agents(url: str, options: argparse.Namespace) -> float:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def lookup(key: str) -> str:
        """Look a key up."""
        return f"the value of {key}"

    async def main() -> float:
        async with AsyncOpenAI(api_key="none", base_url=url, http_client=_http(options)) as client:
            model = OpenAIChatCompletionsModel(model="fixed", openai_client=client)
            agent = Agent(name="w", instructions="Look things up.", model=model, tools=[lookup])

            async def one(number: int) -> str:
                return (await Runner.run(agent, f"item {number}")).final_output

            return await _fan_out(one, options)

    return asyncio.run(main())


def langgraph(url: str, options: argparse.Namespace) -> float:
    """A graph of two nodes (model, tools) around the official client, which langgraph leaves to its user."""
    from operator import add
    from typing import Annotated

    import langgraph.graph as lg
    from openai import AsyncOpenAI
    from typing_extensions import TypedDict

    State = TypedDict("State", {"messages": Annotated[list, add]})  # noqa: UP013 - annotations here are strings
    spec = {"type": "function", "function": {"name": "lookup", "description": "Look a key up.", "parameters": {
        "type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}}  # fmt: skip

    async def main() -> float:
        async with AsyncOpenAI(api_key="none", base_url=url, http_client=_http(options)) as client:

            async def model(state: dict) -> dict:
                reply = await client.chat.completions.create(model="fixed", messages=state["messages"], tools=[spec])
                return {"messages": [reply.choices[0].message.model_dump(exclude_none=True)]}

            async def tools(state: dict) -> dict:
                calls = state["messages"][-1]["tool_calls"]
                values = [f"the value of {json.loads(c['function']['arguments'])['key']}" for c in calls]
                return {"messages": [{"role": "tool", "tool_call_id": c["id"], "content": v}
                                     for c, v in zip(calls, values, strict=True)]}  # fmt: skip

            graph = lg.StateGraph(State)
            graph.add_node("model", model)
            graph.add_node("tools", tools)
            graph.set_entry_point("model")
            graph.add_conditional_edges("model", lambda s: "tools" if s["messages"][-1].get("tool_calls") else lg.END)
            graph.add_edge("tools", "model")
            app = graph.compile()

            async def one(number: int) -> str:
                start = [
                    {"role": "system", "content": "Look things up."},
                    {"role": "user", "content": f"item {number}"},
                ]
                return (await app.ainvoke({"messages": start}))["messages"][-1]["content"]

            return await _fan_out(one, options)

    return asyncio.run(main())


def smolagents(url: str, options: argparse.Namespace) -> float:
    """One agent object and one thread for each sub-agent: smolagents is synchronous, and its objects are not shared."""
    from concurrent.futures import ThreadPoolExecutor

    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def lookup(key: str) -> str:
        """Look a key up.

        Args:
            key: the key
        """
        return f"the value of {key}"

    model = OpenAIServerModel(model_id="fixed", api_base=url, api_key="none")

    def one(number: int) -> Any:
        agent = ToolCallingAgent(tools=[lookup], model=model, max_steps=CALLS, verbosity_level=0)
        return agent.run(f"item {number}")

    began = time.perf_counter()
    with ThreadPoolExecutor(options.concurrent) as pool:
        list(pool.map(one, range(options.agents)))
    return time.perf_counter() - began


def _http(options: argparse.Namespace) -> Any:
    import httpx

    limits = httpx.Limits(max_connections=options.concurrent, max_keepalive_connections=options.concurrent)
    return httpx.AsyncClient(limits=limits, timeout=300)


async def _fan_out(one: Any, options: argparse.Namespace) -> float:
    places = asyncio.Semaphore(options.concurrent)

    async def placed(number: int) -> str:
        async with places:
            return await one(number)

    began = time.perf_counter()
    answers = await asyncio.gather(*map(placed, range(options.agents)))
    seconds = time.perf_counter() - began
    assert set(answers) == {"the answer"}, set(answers)
    return seconds


PEERS = {"openai_agents": openai_agents, "langgraph": langgraph, "smolagents": smolagents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--repeat", type=int, default=3, help="runs of ours; a peer runs after each of the first ones")
    parser.add_argument("--peer-repeat", type=int, default=1)
    parser.add_argument("--peers", default="openai_agents,langgraph", help="comma-separated, of " + ", ".join(PEERS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.latency, options.agents)
    command = [sys.executable, __file__, "--serve", f"--latency={options.latency}", f"--agents={options.agents}"]
    endpoint = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert endpoint.stdout is not None
        url = f"http://127.0.0.1:{int(endpoint.stdout.readline())}/v1"
        report = measure(url, options)
    finally:
        endpoint.terminate()
        endpoint.wait()
    print(json.dumps(report, indent=2) if options.json else as_text(report))


def check_calls(url: str, name: str, expected: int) -> None:
    """The endpoint's own count: nobody skipped a call or paid for one twice."""
    with urllib.request.urlopen(url + "/count") as response:
        counted = int(response.read())
    if counted != expected:
        raise SystemExit(f"{name} made {counted} calls instead of {expected}: not comparable")


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    mine: list[dict[str, float]] = []
    peers: dict[str, list[dict[str, float]]] = {name: [] for name in options.peers.split(",") if name}
    for turn in range(max(options.repeat, options.peer_repeat)):
        if turn < options.repeat:
            mine.append(ours(url, options))
            check_calls(url, "ours", options.agents * CALLS + 2)
            print(f"ours {mine[-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
        for name in peers:
            if turn < options.peer_repeat:
                cpu = time.process_time()
                seconds = PEERS[name](url, options)
                check_calls(url, name, options.agents * CALLS)
                peers[name].append({"seconds": seconds, "cpu": time.process_time() - cpu})
                print(f"{name} {seconds:.2f} s", file=sys.stderr, flush=True)
    median = lambda rows, key: statistics.median(row[key] for row in rows)
    makespan = median(mine, "seconds")
    calls = options.agents * CALLS
    bound = options.latency * (2 + max(CALLS, calls / options.concurrent))
    medians = {"seconds": makespan, "bound_seconds": bound,
               "cpu_ms_per_call": statistics.median(1000 * row["cpu"] / row["calls"] for row in mine),
               "mb_at_a_fifth": median(mine, "mb_at_fifth"), "mb_at_the_end": median(mine, "mb_at_end")}  # fmt: skip
    for name, rows in peers.items():
        medians[f"{name}_seconds"] = median(rows, "seconds")
        medians[f"{name}_cpu_ms_per_call"] = 1000 * median(rows, "cpu") / calls
    ratios = {"bound": bound / makespan} | {name: medians[f"{name}_seconds"] / makespan for name in peers}
    return {"meta": meta(options, list(peers)), "medians": medians, "ratios": ratios}


def meta(options: argparse.Namespace, peers: list[str]) -> dict[str, Any]:
    versions = {}
    for name in ("aiohttp", "openai", *(peer.replace("_", "-") for peer in peers)):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {"agents": options.agents, "calls_each": CALLS, "concurrent": options.concurrent,
            "latency_seconds": options.latency, "runs_ours": options.repeat, "runs_peers": options.peer_repeat,
            "python": platform.python_version(), "processors": os.cpu_count(), "versions": versions}  # fmt: skip


def as_text(report: dict[str, Any]) -> str:
    rows = [f"{name:32} {value:10.3f}" for part in ("medians", "ratios") for name, value in report[part].items()]
    return "\n".join([json.dumps(report["meta"]), *rows])


if __name__ == "__main__":
    main()
