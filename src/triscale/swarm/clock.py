"""Real time, and a virtual clock under which hours run in milliseconds and makespans are exact.

Everything in this room waits through asyncio, so the clock is a property of the event loop: ``run(main, virtual=True)``
uses a loop that, when nothing is ready, jumps to the next timer. Work outside the loop (threads) is waited for in real
time and takes no virtual time; sockets and subprocesses belong to real time only.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_ANCHOR = time.time() - time.monotonic()  # so that timestamps never jump when the wall clock is adjusted


def now() -> float:
    """Seconds of the running loop's clock, for differences."""
    return asyncio.get_running_loop().time()


def timestamp() -> float:
    """Seconds since the epoch, or since the start of a virtual clock; this is what events carry."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return _ANCHOR + time.monotonic()
    return loop.time() if isinstance(loop, VirtualLoop) else _ANCHOR + loop.time()


def is_virtual() -> bool:
    return isinstance(asyncio.get_running_loop(), VirtualLoop)


def run(main: Coroutine[Any, Any, T], *, virtual: bool = False) -> T:
    """Run ``main`` to its end on a fresh loop, with real or virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop if virtual else None) as runner:
        return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is a number that jumps to the next timer instead of waiting for it.

    Raises ``RuntimeError`` where a real loop would wait for ever: nothing ready, no timer, no thread at work.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._threads = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._threads += 1  # the base class waits for a thread of its own here
        try:
            await super().shutdown_default_executor()
        finally:
            self._threads -= 1

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._threads -= 1

    def jump(self) -> None:
        """Move time to the first timer (exactly: ``now + (when - now)`` may be an ulp off)."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        self._now = max(self._now, scheduled[0].when())


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.loop._threads:
            return super().select(None)  # its result arrives through the loop's own wake-up socket
        if timeout is None:
            raise RuntimeError("virtual clock: every task waits and no timer is set; this would hang for ever")
        self.loop.jump()
        return []
