"""Lifetimes: why something was stopped, run time that excludes queueing, and calls that end in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from . import clock
from .types import Outcome

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a run was stopped from outside: its outcome, the reason in words, and the limit if it was one."""

    outcome: Outcome
    reason: str
    limit: str | None = None


class Scope:
    """The lifetime of one agent's run.

    ``stop`` cancels the run's task with a cause; children inherit the cause, since cancelling a task group cancels
    them. ``seconds`` bounds the run time, which stands still between :meth:`pause` and :meth:`resume`.
    """

    def __init__(self, parent: Scope | None = None, seconds: float | None = None):
        self.parent, self.seconds = parent, seconds
        self.ran = 0.0
        self._own: Cause | None = None
        self._task: asyncio.Task[Any] | None = None
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def cause(self) -> Cause | None:
        return self._own or (self.parent.cause if self.parent is not None else None)

    def attach(self) -> None:
        """From now on ``stop`` cancels the current task; run time starts with :meth:`resume`."""
        self._task = asyncio.current_task()

    def stop(self, cause: Cause) -> None:
        """Stop this run and everything below it; a second cause changes nothing."""
        if self._own is None and not self._closed:
            self._own = cause
            if self._task is not None:
                self._task.cancel()

    def pause(self) -> None:
        if self._since is not None:
            self.ran += clock.now() - self._since
            self._since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        if self._closed or self._since is not None:
            return
        self._since = clock.now()
        if self.seconds is not None:
            left = max(0.0, self.seconds - self.ran)
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)

    def _expire(self) -> None:
        self.stop(Cause(Outcome.TIMED_OUT, f"task_seconds = {self.seconds:g} of run time used up", "task_seconds"))

    def close(self) -> None:
        """The run is over: count its last seconds; no deadline or stop reaches it any more."""
        self.pause()
        self._closed = True
        self._task = None


async def bounded(
    work: Coroutine[Any, Any, T], seconds: float | None, grace: float, abandon: Callable[[asyncio.Task[T]], None]
) -> T:
    """Await ``work`` for at most ``seconds`` (then ``TimeoutError``); cancelling takes at most ``grace`` more.

    Work that ignores its cancellation is handed to ``abandon`` instead of being waited for. Work that cancels itself
    raises ``RuntimeError``, so that it cannot be mistaken for a cancellation of its caller.
    """
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait((task,), timeout=seconds)
    except asyncio.CancelledError:
        await _end(task, grace, abandon)
        raise
    if done:
        if task.cancelled():
            raise RuntimeError("the call cancelled itself")
        return task.result()
    await _end(task, grace, abandon)
    raise TimeoutError


async def _end(task: asyncio.Task[T], grace: float, abandon: Callable[[asyncio.Task[T]], None]) -> None:
    deadline = clock.now() + grace
    cancelled_again = False
    task.cancel()
    while not task.done():
        left = deadline - clock.now()
        if left <= 0:
            abandon(task)
            break
        try:
            await asyncio.wait((task,), timeout=left)
        except asyncio.CancelledError:
            cancelled_again = True
    if task.done() and not task.cancelled():
        task.exception()  # mark it as seen: the caller reports the timeout or the cancellation
    if cancelled_again:
        raise asyncio.CancelledError
