"""Lock files that let several processes or hosts share one ladder folder."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

STALE_SECONDS = 15 * 60  # a lock that was not refreshed for this long is taken over


class CellLock:
    """Holds ``cell/.lock`` while a cell runs; refresh it now and then with :meth:`touch`.

    It says who works on what, across hosts too; should two processes take over one dead lock at once, the lock of the
    run folder itself (:meth:`triscale.train.run_directory.RunDirectory.exclusive`) turns one of them away.
    """

    def __init__(self, folder: Path):
        self.path = folder / ".lock"
        self.mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})

    def acquire(self) -> bool:
        """True if the cell is ours now; a lock left by a dead process is taken over."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                if not self._dead():
                    return False
                self.path.unlink(missing_ok=True)
                continue
            with os.fdopen(descriptor, "w") as file:
                file.write(self.mine)
            return True
        return False

    def _dead(self) -> bool:
        try:
            text, age = self.path.read_text(), time.time() - self.path.stat().st_mtime
        except OSError:
            return False  # just released: somebody was there
        try:
            owner = json.loads(text)
        except ValueError:
            owner = {}  # being written, or its writer died over it
        if age > STALE_SECONDS:  # on this host too: the process id may belong to another program by now
            return True
        if owner.get("host") != socket.gethostname():
            return False
        pid = owner.get("pid", 0)
        if pid == os.getpid():
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def touch(self) -> None:
        with suppress(OSError):
            os.utime(self.path)

    def release(self) -> None:
        """Give the cell back; a lock that another process took over meanwhile stays its own."""
        with suppress(OSError):
            if self.path.read_text() == self.mine:
                self.path.unlink()
