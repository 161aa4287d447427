"""Ctrl-C that stops at a safe place: acknowledged at once, a second one exits immediately."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress


class Interrupted(Exception):
    """The user asked to stop; the run's last completed step is saved."""


class InterruptGuard:
    """While active, the first SIGINT or SIGTERM sets ``requested``; the second ends the process.

    Signal handlers exist only in the main thread; elsewhere the guard does nothing. Under ``torchrun`` one Ctrl-C arrives
    twice, from the terminal and passed on by torchrun: signals within ``grace`` seconds of the first are the same one.
    """

    def __init__(self, message: str = "stopping: saving the last completed step (press again to exit at once)"):
        """message: written to standard error at the signal; "" writes nothing."""
        self.message, self.requested = message, False
        self.grace, self._first = (5.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0), 0.0
        self._old: dict[int, object] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._old.clear()

    def _handle(self, number: int, frame: object) -> None:
        if self._first and time.monotonic() - self._first >= self.grace:
            os._exit(128 + number)
        if self._first:
            return
        self.requested, self._first = True, time.monotonic()
        if not self.message:
            return
        with suppress(OSError, ValueError):  # a closed or replaced stderr must not break the step under way
            os.write(sys.stderr.fileno() if sys.stderr else 2, f"\n{self.message}\n".encode())

    def check(self) -> None:
        if self.requested:
            raise Interrupted
