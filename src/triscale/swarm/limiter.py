"""One rate limiter per endpoint and key, shared by every agent that uses it.

After a 429 the capacity becomes a share of what was in flight, everybody pauses for the server's ``Retry-After`` (or an
exponential back-off), and each success then adds 1/capacity, so that capacity regrows by one per round. Replies to
requests sent before the last reduction do not reduce it again. Exhausted quota or a refused key closes the limiter:
whoever waits fails at once instead of trying for hours.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from . import clock
from .types import ModelError, Usage

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How failed calls are tried again.

    transient: attempts when the server fails or cuts the stream; timeouts: when it does not reply. backoff: seconds of
    the first wait, doubled up to longest. rate_seconds: how long one call may wait for a rate limit in all, before it
    counts as exhausted quota. shrink: share of the calls in flight that a 429 leaves.
    """

    transient: int = 5
    timeouts: int = 2
    backoff: float = 1.0
    longest: float = 60.0
    rate_seconds: float = 3600.0
    shrink: float = 0.7

    def attempts(self, kind: str) -> int:
        """How often a call is tried that keeps failing this way."""
        return {"transient": self.transient, "bad_reply": self.transient, "timeout": self.timeouts}.get(kind, 1)


@dataclass(slots=True)
class CallRecord:
    """What one call went through: seconds waited, seconds of the attempt that counted, and failed attempts with what
    they cost nevertheless."""

    queued: float = 0.0
    seconds: float = 0.0
    attempts: int = 0
    wasted: Usage = Usage()
    retries: list[dict[str, Any]] = field(default_factory=list)


class RateLimiter:
    """Admits at most ``capacity`` concurrent calls to one endpoint, in order of arrival.

    listener: called as ``listener(endpoint=, event=, capacity=, reason=, seconds=)`` on each change worth telling.
    """

    def __init__(
        self, endpoint: str, capacity: int = 1000, policy: RetryPolicy | None = None,
        listener: Callable[..., Any] | None = None,
    ):  # fmt: skip
        self.endpoint, self.ceiling, self.policy = endpoint, capacity, policy or RetryPolicy()
        self.capacity = float(capacity)
        self.listener = listener
        self.in_flight = 0
        self.peak = 0
        self.closed: ModelError | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._paused_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._generation = 0  # of the capacity; a reply to a request of an older one does not shrink it again
        self._refusals = 0  # 429s in a row, for the back-off
        self._told = capacity
        self._random = random.Random(endpoint)  # jitter, the same in every run

    async def call(self, attempt: Callable[[], Awaitable[T]], record: CallRecord) -> T:
        """Run ``attempt`` until it succeeds or trying again is pointless; raises :class:`ModelError`."""
        failures, rate_wait = 0, 0.0
        while True:
            waited = await self._acquire()
            record.queued += waited
            rate_wait += waited if record.retries else 0.0
            record.attempts += 1
            began, generation = clock.now(), self._generation
            try:
                result = await attempt()
            except ModelError as error:
                record.wasted = record.wasted + (error.usage or Usage())
                record.retries.append({"kind": error.kind, "message": str(error), "seconds": clock.now() - began})
                if error.kind in ("quota", "auth"):
                    self.close(error)  # before the place is freed: nobody else is to try
                self._release()
                if error.kind in ("quota", "auth"):
                    raise
                if error.kind == "rate_limited":
                    if rate_wait + (error.retry_after or 0.0) > self.policy.rate_seconds:
                        raise self._give_up(error, rate_wait) from error
                    self._back_off(error, generation)
                    continue
                failures += 1
                if failures >= self.policy.attempts(error.kind):
                    raise
                delay = self._delay(failures - 1)
                record.queued += delay
                await asyncio.sleep(delay)
            except BaseException:
                self._release()
                raise
            else:
                record.seconds = clock.now() - began
                self._release()
                self._grow()
                return result

    def _give_up(self, error: ModelError, waited: float) -> ModelError:
        asks = f"asks to wait {error.retry_after:g} s more" if error.retry_after else "still refuses"
        message = f"{self.endpoint} {asks} after {waited:.0f} s of waiting for its rate limit ({error})"
        final = ModelError("quota", message, status=error.status)
        self.close(final)
        return final

    async def _acquire(self) -> float:
        """Wait for a place; returns the seconds waited."""
        began = clock.now()
        if self.closed is not None:
            raise _again(self.closed)
        if self._waiting or not self._free():
            place = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            self._wake_later()
            try:
                await place  # admitted: _admit has counted it in
            except BaseException:
                if place.done() and not place.cancelled() and place.exception() is None:
                    self._release()  # admitted and cancelled at once: give the place back
                else:
                    self._waiting.remove(place) if place in self._waiting else None
                raise
        else:
            self._count_in()
        return clock.now() - began

    def _free(self) -> bool:
        return self.in_flight < int(self.capacity) and clock.now() >= self._paused_until

    def _count_in(self) -> None:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)

    def _release(self) -> None:
        self.in_flight -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._free():
            place = self._waiting.popleft()
            if not place.done():
                self._count_in()
                place.set_result(None)
        self._wake_later()

    def _wake_later(self) -> None:
        wait = self._paused_until - clock.now()
        if wait > 0 and self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._admit()

    def _back_off(self, error: ModelError, generation: int) -> None:
        now = clock.now()
        if generation == self._generation:
            self._generation += 1
            share = int(min(self.capacity, self.in_flight + 1) * self.policy.shrink)
            self.capacity = float(max(1, share))
            delay = self._delay(self._refusals) if error.retry_after is None else error.retry_after
            self._refusals += 1
            self._paused_until = max(self._paused_until, now + delay)
            self._told = int(self.capacity)
            self._tell("shrink", str(error), self._paused_until - now)
        elif error.retry_after is not None:
            self._paused_until = max(self._paused_until, now + error.retry_after)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_later()

    def _delay(self, exponent: int) -> float:
        ideal = min(self.policy.longest, self.policy.backoff * 2.0 ** min(exponent, 30))
        return ideal * (0.75 + 0.5 * self._random.random())

    def _grow(self) -> None:
        self._refusals = 0
        if self.capacity >= self.ceiling:
            return
        self.capacity = min(float(self.ceiling), self.capacity + 1.0 / self.capacity)
        if int(self.capacity) >= min(self.ceiling, 2 * self._told):
            self._told = int(self.capacity)
            self._tell("grow", "calls succeed again", None)
        self._admit()

    def close(self, error: ModelError) -> None:
        """Fail everybody who waits or comes later: the endpoint takes no more calls with this key."""
        if self.closed is not None:
            return
        self.closed = error
        self._tell("closed", str(error), None)
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(_again(error))

    def _tell(self, event: str, reason: str, seconds: float | None) -> None:
        if self.listener is not None:
            self.listener(endpoint=self.endpoint, event=event, capacity=int(self.capacity), reason=reason,
                          seconds=seconds)  # fmt: skip


def _again(error: ModelError) -> ModelError:
    """A fresh exception with the same content: raising one object in many tasks would mix their tracebacks."""
    return ModelError(error.kind, str(error), retry_after=error.retry_after, status=error.status)


class Limiters:
    """The rate limiters of a process by endpoint. Share one object between swarms that use the same key; each swarm
    adds itself to ``listeners`` while it runs."""

    def __init__(self, capacity: int = 1000, policy: RetryPolicy | None = None):
        self.capacity, self.policy = capacity, policy or RetryPolicy()
        self.listeners: list[Callable[..., Any]] = []
        self._by_endpoint: dict[str, RateLimiter] = {}

    def get(self, endpoint: str) -> RateLimiter:
        limiter = self._by_endpoint.get(endpoint)
        if limiter is None:
            limiter = self._by_endpoint[endpoint] = RateLimiter(endpoint, self.capacity, self.policy, self._forward)
        return limiter

    def closed(self) -> list[RateLimiter]:
        return [limiter for limiter in self._by_endpoint.values() if limiter.closed is not None]

    def _forward(self, **change: Any) -> None:
        for listener in tuple(self.listeners):
            listener(**change)
