"""The HTTP client against a local server, with the official ``openai`` client as the oracle for what is on the wire."""

import asyncio
import json
import random
import time
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.config import ConfigError
from triscale.swarm import clock
from triscale.swarm.client_http import HttpClient, _chunks, _refusal
from triscale.swarm.limits import Limits
from triscale.swarm.orchestrator import Swarm
from triscale.swarm.types import Message, ModelError, ModelRequest, Outcome, ToolCall, ToolSpec, Usage

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402

TOOL = ToolSpec("search", "Find.", {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]})
CALLS = [("functions.search:0", "search", '{"q": "größe"}'), ("functions.a.b-c:1", "a.b-c", "{}")]
MESSAGES = (
    Message("system", "be brief"), Message("user", "hello"),
    Message("assistant", "", (ToolCall("functions.search:0", "search", '{"q": "x"}'),)),
    Message("tool", "found", tool_call_id="functions.search:0"),
)  # fmt: skip
USAGE = {
    "prompt_tokens": 120,
    "completion_tokens": 30,
    "total_tokens": 150,
    "prompt_tokens_details": {"cached_tokens": 100},
}


def completion(content=None, calls=(), finish="stop", **extra):
    message = {"role": "assistant", "content": content, **extra}
    if calls:
        message["tool_calls"] = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}}
                                 for i, n, a in calls]  # fmt: skip
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "tiny-1", "usage": USAGE,
            "choices": [{"index": 0, "finish_reason": finish, "message": message}]}  # fmt: skip


def chunks_of(body, seed=0):
    """The same completion as a stream, its texts split at random places."""
    luck = random.Random(seed)
    message, finish = body["choices"][0]["message"], body["choices"][0]["finish_reason"]
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    deltas = [{"role": "assistant", "content": ""}]
    for key in ("reasoning_content", "content"):
        deltas += [{key: piece} for piece in split(message.get(key) or "", luck)]
    for index, call in enumerate(message.get("tool_calls", ())):
        first = {"index": index, "id": call["id"], "type": "function",
                 "function": {"name": call["function"]["name"], "arguments": ""}}  # fmt: skip
        rest = [{"index": index, "function": {"arguments": piece}} for piece in
                split(call["function"]["arguments"], luck)]  # fmt: skip
        deltas += [{"tool_calls": [piece]} for piece in (first, *rest)]
    made = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    made.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return [*made, {**head, "choices": [], "usage": body["usage"]}]


def split(text, luck):
    while text:
        n = luck.randint(1, 4)
        yield text[:n]
        text = text[n:]


class Server:
    """Answers with ``answer(body, number)``: a dict, a Response, or "cut" / "hang" for a stream."""

    def __init__(self, answer):
        self.answer, self.bodies, self.headers, self.dropped = answer, [], [], 0

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_get("/v1/models", lambda _: web.json_response({"data": [{"id": "tiny", "max_model_len": 4321}]}))
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def handle(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        answer = self.answer(body, len(self.bodies))
        if isinstance(answer, web.Response):
            return answer
        if answer == "hang":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self.dropped += 1
                raise
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunks = chunks_of(completion("half") if answer == "cut" else answer)
        if answer == "cut":
            chunks = chunks[:2]
        raw = b": keep alive\n\n" + b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks)
        raw += b"" if answer == "cut" else b"data: [DONE]\n\n"
        for start in range(0, len(raw), 37):  # lines split anywhere
            await response.write(raw[start : start + 37])
        return response


def client(server, **options):
    return HttpClient.Config(model="tiny", base_url=server.url, **options).build()


ANSWERS = {
    "text": completion("Grüße, 世界"),
    "calls": completion(None, CALLS, "tool_calls"),
    "calls and text": completion("Let me look.", CALLS[:1], "tool_calls"),
    "reasoning": completion("42", reasoning_content="6 x 7"),
    "length": completion("cut o", finish="length"),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
def test_replies_are_what_the_official_client_reads(name, stream):
    openai = pytest.importorskip("openai")

    async def main():
        async with Server(lambda body, n: ANSWERS[name]) as server:
            ours = client(server, stream=stream)
            reply = await ours.complete(ModelRequest(MESSAGES, [TOOL], temperature=0.5, max_tokens=64))
            await ours.close()
            async with openai.AsyncOpenAI(api_key="k", base_url=server.url) as official:
                theirs = await official.chat.completions.create(
                    model="tiny", temperature=0.5, max_tokens=64, tools=[TOOL.to_wire()],
                    messages=[message.to_wire() for message in MESSAGES],
                    **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
                )  # fmt: skip
                seen = await collect(theirs) if stream else whole(theirs)
            return reply, seen, server.bodies

    reply, seen, bodies = clock.run(main())
    assert bodies[0] == bodies[1]  # the same request, field by field
    assert seen == {
        "content": reply.content, "finish": reply.finish_reason, "model": reply.model,
        "calls": [(c.id, c.name, c.arguments) for c in reply.tool_calls], "reasoning": reply.message.reasoning or "",
        "usage": (reply.usage.tokens_in, reply.usage.tokens_out, reply.usage.tokens_cached),
    }  # fmt: skip
    assert reply.usage == Usage(120, 30, 100)


def whole(body):
    choice, usage = body.choices[0], body.usage
    return {
        "content": choice.message.content or "", "finish": choice.finish_reason, "model": body.model,
        "calls": [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()],
        "reasoning": getattr(choice.message, "reasoning_content", None) or "",
        "usage": (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens),
    }  # fmt: skip


async def collect(stream):
    content, reasoning, calls, finish, usage, model = "", "", {}, None, None, None
    async for chunk in stream:
        model, usage = chunk.model, chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or ():
                slot = calls.setdefault(piece.index, ["", "", ""])
                slot[0] += piece.id or ""
                slot[1] += piece.function.name or ""
                slot[2] += piece.function.arguments or ""
    return {
        "content": content, "finish": finish, "model": model, "calls": [tuple(c) for c in calls.values()],
        "reasoning": reasoning,
        "usage": (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens),
    }  # fmt: skip


def test_the_key_comes_from_the_environment_and_shows_nowhere(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-secret-123")

    async def main():
        async with Server(lambda body, n: ANSWERS["text"]) as server:
            ours = client(server, api_key_env="SOME_KEY")
            await ours.complete(ModelRequest(MESSAGES))
            await ours.close()
            return ours, server.headers[0]

    ours, headers = clock.run(main())
    assert headers["Authorization"] == "Bearer sk-secret-123"
    assert "secret" not in ours.endpoint and "secret" not in repr(ours.config)
    monkeypatch.setenv("SOME_KEY", "another")
    assert client(type("S", (), {"url": ours.config.base_url}), api_key_env="SOME_KEY").endpoint != ours.endpoint


def refusal(status, text="", **headers):
    return web.Response(status=status, text=text, headers=headers)


@pytest.mark.parametrize(
    "answer, kind, retry_after",
    [
        (refusal(429, "slow down", **{"Retry-After": "7"}), "rate_limited", 7.0),
        (refusal(429, "slow down", **{"retry-after-ms": "250"}), "rate_limited", 0.25),
        (refusal(429, '{"error": {"code": "insufficient_quota"}}'), "quota", None),
        (refusal(403, "exceeded your current quota"), "quota", None),
        (refusal(402, "pay"), "quota", None),
        (refusal(401, "bad key"), "auth", None),
        (refusal(403, "forbidden"), "auth", None),
        (refusal(503, "busy", **{"Retry-After": "1"}), "rate_limited", 1.0),
        (refusal(500, "oops"), "transient", None),
        (refusal(400, "This model's maximum context length is 8192 tokens"), "context", None),
        (refusal(400, "bad temperature"), "bad_request", None),
        (refusal(404, "no such model"), "bad_request", None),
        (refusal(200, "<html>"), "bad_reply", None),
        (refusal(200, '{"choices": []}'), "bad_reply", None),
    ],
)
def test_errors_have_kinds(answer, kind, retry_after):
    async def main():
        async with Server(lambda body, n: answer) as server:
            ours = client(server)
            with pytest.raises(ModelError) as caught:
                await ours.complete(ModelRequest(MESSAGES))
            await ours.close()
            return caught.value

    error = clock.run(main())
    assert (error.kind, error.retry_after) == (kind, retry_after)


def test_retry_after_as_a_date():
    error = _refusal(429, {"Retry-After": formatdate(time.time() + 30, usegmt=True)}, "")
    assert 25 < error.retry_after <= 30
    assert _refusal(429, {"Retry-After": "soon"}, "").retry_after is None


def test_a_cut_stream_is_tried_again_and_a_refused_connection_is_transient():
    async def main():
        async with Server(lambda body, n: "cut" if n == 1 else ANSWERS["text"]) as server:
            ours = client(server, stream=True)
            with pytest.raises(ModelError, match="cut the stream") as cut:
                await ours.complete(ModelRequest(MESSAGES))
            reply = await ours.complete(ModelRequest(MESSAGES))
        with pytest.raises(ModelError) as refused:
            await ours.complete(ModelRequest(MESSAGES))
        await ours.close()
        return cut.value.kind, reply.content, refused.value.kind

    assert clock.run(main()) == ("transient", "Grüße, 世界", "transient")


def test_cancelling_a_call_drops_the_connection():
    """The server sees the client go, so that it can stop generating."""

    async def main():
        async with Server(lambda body, n: "hang") as server:
            ours = client(server)
            task = asyncio.create_task(ours.complete(ModelRequest(MESSAGES)))
            while not server.bodies:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not server.dropped:
                await asyncio.sleep(0.01)
            await ours.close()
            return server.dropped

    assert clock.run(main()) == 1


def test_the_window_is_asked_from_the_server():
    async def main():
        async with Server(lambda body, n: ANSWERS["text"]) as server:
            ours = client(server)
            await ours.discover()
            await ours.close()
            return ours.context_window

    assert clock.run(main()) == 4321


@given(st.binary(max_size=200), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_event_streams_parse_wherever_they_are_split(noise, step):
    """Comments, odd line ends and splits inside a line or a character change nothing."""
    payloads = [{"text": "é世"}, {"n": [1, 2]}, {"empty": ""}]
    noise = b":" + noise.replace(b"\n", b"").replace(b"\r", b"") + b"\r\n"
    raw = noise + b"".join(b"data:" + json.dumps(p, ensure_ascii=False).encode() + b"\r\n\r\n" for p in payloads)
    raw += b"data: [DONE]\n\ndata: {not json"

    class Response:
        class content:
            @staticmethod
            async def iter_any():
                for start in range(0, len(raw), step):
                    yield raw[start : start + step]

    async def main():
        return [chunk async for chunk in _chunks(Response)]

    assert clock.run(main()) == payloads


@pytest.mark.parametrize("bad", [{"base_url": "localhost:80"}, {"model": ""}, {"prices": (1.0,)}])
def test_bad_settings_are_named(bad):
    good = {"model": "m", "base_url": "http://localhost/v1"}
    with pytest.raises(ConfigError):
        HttpClient.Config(**{**good, **bad})


def test_a_whole_swarm_over_http():
    """Orchestrator and sub-agents over the wire, with a 429 and a 500 on the way."""

    def answer(body, number):
        if number in (2, 3):
            return refusal(429 if number == 2 else 500, "wait", **{"retry-after-ms": "10"})
        tools = {t["function"]["name"] for t in body.get("tools", ())}
        if "assign_task" not in tools:
            return completion("did " + body["messages"][-1]["content"])
        if len(body["messages"]) == 2:
            calls = [("", "create_subagent", '{"name": "w", "system_prompt": ""}')]
            calls += [("", "assign_task", json.dumps({"agent": "w", "prompt": str(i)})) for i in range(5)]
            return completion(None, calls, "tool_calls")
        return completion("; ".join(m["content"] for m in body["messages"] if m["role"] == "tool"))

    async def main():
        async with Server(answer) as server:
            swarm = Swarm(client=client(server, prices=(10.0, 100.0, 1.0)), limits=Limits(concurrent=3))
            return await swarm.run("q"), swarm

    result, swarm = clock.run(main())
    assert result.outcome == Outcome.COMPLETED
    assert result.text == "Sub-agent 'w' created.; did 0; did 1; did 2; did 3; did 4"
    assert result.usage.tokens_in == 7 * 120
    assert result.usage.cost == pytest.approx(7 * (20 * 10 + 100 * 1 + 30 * 100) / 1e6)
    assert sum(e["data"]["attempts"] for e in swarm.log.events if e["kind"] == "model.reply") == 9
