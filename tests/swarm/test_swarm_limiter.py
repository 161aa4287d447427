"""The rate limiter under the virtual clock, against a server that allows so many calls and refuses the rest."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.swarm import clock
from triscale.swarm.limiter import CallRecord, Limiters, RateLimiter, RetryPolicy
from triscale.swarm.types import ModelError


class Server:
    """Answers in one second; refuses whatever exceeds ``allowed`` concurrent calls, with or without Retry-After."""

    def __init__(self, allowed, retry_after=None):
        self.allowed, self.retry_after = allowed, retry_after
        self.now = self.refused = self.answered = 0

    async def __call__(self):
        if self.now >= self.allowed:
            self.refused += 1
            raise ModelError("rate_limited", "429", retry_after=self.retry_after, status=429)
        self.now += 1
        try:
            await asyncio.sleep(1.0)
        finally:
            self.now -= 1
        self.answered += 1
        return "ok"


async def crowd(limiter, server, calls):
    records = [CallRecord() for _ in range(calls)]
    results = await asyncio.gather(*(limiter.call(server, record) for record in records), return_exceptions=True)
    return results, records, clock.now()


def test_429s_shrink_pause_and_regrow():
    told = []
    limiter = RateLimiter("e", 64, listener=lambda **change: told.append(change))
    server = Server(allowed=10, retry_after=5.0)
    results, records, seconds = clock.run(crowd(limiter, server, 400), virtual=True)
    assert results == ["ok"] * 400 and limiter.in_flight == 0
    assert server.refused < 400  # it learns: without shrinking every one would be refused many times
    assert told[0]["event"] == "shrink" and told[0]["capacity"] == int(11 * 0.7) and told[0]["seconds"] == 5.0
    assert 40 <= seconds < 400  # at least 10 at a time is 40 s; one at a time would be 400 s
    assert all(record.attempts == 1 + len(record.retries) for record in records)


def test_retry_after_is_honoured_by_everybody():
    times = []

    async def attempt():
        times.append(clock.now())
        if len(times) == 1:
            raise ModelError("rate_limited", "429", retry_after=30.0)
        return "ok"

    async def scenario():
        limiter = RateLimiter("e", 5)
        await asyncio.gather(*(limiter.call(attempt, CallRecord()) for _ in range(3)))

    clock.run(scenario(), virtual=True)
    assert times[0] == 0.0 and sorted(times)[-1] >= 30.0
    assert [t for t in times if 0.0 < t < 30.0] == []


def test_one_burst_of_refusals_shrinks_once():
    told = []

    async def attempt():
        await asyncio.sleep(0.1)
        if clock.now() < 0.5:
            raise ModelError("rate_limited", "429")
        return "ok"

    async def scenario():
        limiter = RateLimiter("e", 100, listener=lambda **change: told.append(change))
        await asyncio.gather(*(limiter.call(attempt, CallRecord()) for _ in range(100)))

    clock.run(scenario(), virtual=True)
    assert [t["capacity"] for t in told if t["event"] == "shrink"] == [70]


def test_quota_fails_everybody_at_once():
    async def attempt():
        await asyncio.sleep(1.0)
        raise ModelError("quota", "no money")

    results, _, seconds = clock.run(crowd(RateLimiter("e", 2), attempt, 50), virtual=True)
    assert {r.kind for r in results} == {"quota"} and seconds == 1.0
    assert len({id(r) for r in results}) == 50


def test_an_endless_rate_limit_becomes_quota():
    policy = RetryPolicy(rate_seconds=100)

    async def attempt():
        raise ModelError("rate_limited", "429", retry_after=40.0)

    results, _records, seconds = clock.run(crowd(RateLimiter("e", 1, policy), attempt, 1), virtual=True)
    assert results[0].kind == "quota" and "80 s of waiting" in str(results[0]) and seconds == 80.0
    results, _, seconds = clock.run(crowd(RateLimiter("e", 1, RetryPolicy(rate_seconds=30)), attempt, 1), virtual=True)
    assert results[0].kind == "quota" and seconds == 0.0  # a wait it would not outlast is not begun


@pytest.mark.parametrize("kind, attempts", [("transient", 5), ("bad_reply", 5), ("timeout", 2), ("bad_request", 1),
                                            ("context", 1)])  # fmt: skip
def test_each_kind_of_failure_has_its_number_of_attempts(kind, attempts):
    async def attempt():
        raise ModelError(kind, "no")

    results, (record,), _ = clock.run(crowd(RateLimiter("e"), attempt, 1), virtual=True)
    assert results[0].kind == kind and record.attempts == attempts


def test_a_wait_between_attempts_holds_no_place():
    async def scenario():
        limiter = RateLimiter("e", 1)
        failed = []

        async def failing():
            if not failed:
                failed.append(1)
                raise ModelError("transient", "500")
            return "late"

        async def quick():
            return clock.now()

        late = asyncio.create_task(limiter.call(failing, CallRecord()))
        await asyncio.sleep(0)
        assert await limiter.call(quick, CallRecord()) < 0.1
        return await late

    assert clock.run(scenario(), virtual=True) == "late"


def test_limiters_are_shared_by_endpoint():
    limiters = Limiters(capacity=3)
    assert limiters.get("a") is limiters.get("a") and limiters.get("a") is not limiters.get("b")


actions = st.lists(
    st.tuples(
        st.floats(0, 5), st.sampled_from(["ok", "rate_limited", "transient", "cancel", "crash"]), st.floats(0, 3)
    ),
    min_size=1,
    max_size=30,
)


@given(actions, st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_places_are_never_lost_or_overbooked(plan, capacity):
    """Whatever calls do and whenever they are cancelled, in the end nobody is in flight and one more gets through."""
    outcomes: Counter = Counter()

    async def one(limiter, start, what, seconds):
        await asyncio.sleep(start)
        tries = []

        async def attempt():
            assert limiter.in_flight <= limiter.ceiling
            tries.append(1)
            await asyncio.sleep(seconds)
            if what in ("rate_limited", "transient") and len(tries) < 3:
                raise ModelError(what, "no", retry_after=1.0 if what == "rate_limited" else None)
            if what == "crash":
                raise KeyError("bug")
            return "ok"

        task = asyncio.create_task(limiter.call(attempt, CallRecord()))
        if what == "cancel":
            await asyncio.sleep(seconds)
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        outcomes[type(result).__name__] += 1

    async def scenario():
        limiter = RateLimiter("e", capacity)
        await asyncio.gather(*(one(limiter, *step) for step in plan))
        assert limiter.in_flight == 0 and limiter.peak <= capacity
        return await limiter.call(lambda: asyncio.sleep(0, "through"), CallRecord())

    assert clock.run(scenario(), virtual=True) == "through"
    assert sum(outcomes.values()) == len(plan)
    assert set(outcomes) <= {"str", "CancelledError", "KeyError"}


def test_a_call_cancelled_in_the_moment_it_is_admitted_gives_its_place_back():
    async def scenario():
        limiter, tasks = RateLimiter("e", 1), []

        async def first():
            await asyncio.sleep(1.0)
            asyncio.get_running_loop().call_soon(
                tasks[1].cancel
            )  # runs after the place is handed on, before it is taken

        tasks.append(asyncio.create_task(limiter.call(first, CallRecord())))
        tasks.append(asyncio.create_task(limiter.call(lambda: asyncio.sleep(0, "second"), CallRecord())))
        await asyncio.wait(tasks)
        third = await asyncio.wait_for(limiter.call(lambda: asyncio.sleep(0, "third"), CallRecord()), 5.0)
        return tasks[1].cancelled(), limiter.in_flight, third

    assert clock.run(scenario(), virtual=True) == (True, 0, "third")
