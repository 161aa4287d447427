"""Lock files that let several processes or hosts share one ladder folder."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

STALE_SECONDS = 15 * 60  # a lock of another host that was not refreshed for this long is taken over


class CellLock:
    """Holds ``cell/.lock`` while a cell runs; refresh it now and then with :meth:`touch`."""

    def __init__(self, folder: Path):
        self.path = folder / ".lock"

    def acquire(self) -> bool:
        """True if the cell is ours now; a lock left by a dead process is taken over."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        for _ in range(2):
            try:
                descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                if not self._dead():
                    return False
                self.path.unlink(missing_ok=True)
                continue
            with os.fdopen(descriptor, "w") as file:
                file.write(mine)
            return True
        return False

    def _dead(self) -> bool:
        try:
            owner = json.loads(self.path.read_text() or "{}")
            age = time.time() - self.path.stat().st_mtime
        except (OSError, ValueError):
            return False  # being written or just released: somebody is there
        if owner.get("host") != socket.gethostname():
            return age > STALE_SECONDS
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
        if self.path.exists():
            os.utime(self.path)

    def release(self) -> None:
        self.path.unlink(missing_ok=True)
