"""Python code in a subprocess with limits on time, memory, file size and the network.

What holds the code, and what does not:

- time: the process group is killed at the limit, and when the call is cancelled;
- memory (address space), CPU time, size of any file written and number of open files: resource limits of the kernel;
- network, and processes that try to outlive the call: on Linux where user namespaces are allowed, the code runs in
  its own network and process namespace, so there is no network device and everything dies with its first process.
  Elsewhere the network is refused inside the interpreter only (an audit hook, which hostile code can get around) and a
  process that leaves the group can outlive the call. ``Isolation.network`` says which of the two a result had;
  ``strict=True`` refuses to run without the namespace;
- the environment is empty but for PATH, HOME, TMPDIR and locale, so keys in environment variables are not visible.

NOT protected: the code runs as the same user. It can read every file that user can read, write outside the workspace
wherever that user may write, fill the disk with many small files, and use the processor until the time limit. Nothing
here stops an attack on the kernel. Run untrusted work in a container or a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...config import ConfigError

NOT_PROTECTED = (
    "The code runs as the same user: it can read that user's files, write outside the workspace where the user may, "
    "and attack the kernel. Use a container or a virtual machine for untrusted work."
)


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """seconds: wall clock. memory_mb: address space. file_mb: largest file written. output_chars: kept of each stream.

    strict: refuse to run where the kernel cannot cut the network.
    """

    seconds: float = 30.0
    memory_mb: int = 1024
    file_mb: int = 64
    output_chars: int = 20_000
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "file_mb", "output_chars"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"python.{name}", f"{getattr(self, name)!r} is not positive", "Give a number above 0")


@dataclass(frozen=True)
class SandboxResult:
    """code: the exit status (negative = signal). stopped: "" or "time". network: "namespace" or "interpreter"."""

    code: int
    stdout: str
    stderr: str
    stopped: str
    network: str

    def text(self, limits: SandboxLimits) -> str:
        """The result as a tool answers it."""
        parts = [self.stdout.rstrip()] if self.stdout.strip() else []
        if self.stopped == "time":
            parts.append(f"[stopped: the time limit of {limits.seconds:g} s was reached]")
        elif self.code:
            parts.append(f"[exit status {self.code}]")
        if self.stderr.strip():
            parts.append(f"[stderr]\n{self.stderr.rstrip()}")
        return "\n".join(parts) or "[no output; print() what you want to see]"


# Runs before the user's code, in its own interpreter. One argument: JSON with the limits. The code comes on stdin.
_BOOTSTRAP = r"""
import ctypes, json, os, resource, signal, sys
opts = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
isolated = False
if sys.platform == "linux" and libc.unshare(0x10000000 | 0x40000000 | 0x20000000) == 0:  # NEWUSER | NEWNET | NEWPID
    isolated = True
    try:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(line)
    except OSError:
        pass  # unmapped ids only change what whoami says
os.write(opts["status"], b"namespace" if isolated else b"interpreter")
os.close(opts["status"])
if not isolated and opts["strict"]:
    sys.exit(125)
source = sys.stdin.read()
if isolated:
    parent = os.getpid()
    child = os.fork()
    if child:
        while True:
            try:
                _, status = os.waitpid(child, 0)
                break
            except InterruptedError:
                continue
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(1, signal.SIGKILL)  # die with the outer process, and take the whole process namespace along
    if os.getppid() not in (0, parent):
        os._exit(137)
mb = 1 << 20
resource.setrlimit(resource.RLIMIT_AS, (opts["memory_mb"] * mb,) * 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (opts["file_mb"] * mb,) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
cpu = int(opts["seconds"]) + 1
resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # too large a file is an OSError in the code, not a dead process
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
def refuse(event, args):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.sendmsg"):
        raise PermissionError("the network is not available to this code")
sys.addaudithook(refuse)
import linecache
linecache.cache["<code>"] = (len(source), None, source.splitlines(True), "<code>")  # tracebacks show the lines
sys.argv = ["<code>"]
sys.path.insert(0, os.getcwd())
try:
    exec(compile(source, "<code>", "exec"), {"__name__": "__main__"})
except Exception as error:
    import traceback
    traceback.print_exception(type(error), error, error.__traceback__.tb_next)
    sys.exit(1)
"""


async def run_python(code: str, folder: str | Path, limits: SandboxLimits | None = None) -> SandboxResult:
    """Run ``code`` with ``folder`` as working directory; never raises for what the code does.

    Raises :class:`ConfigError` when ``limits.strict`` is set and the kernel offers no network namespace, and on
    systems without POSIX resource limits. Cancelling kills the code before the cancellation goes on.
    """
    limits = limits or SandboxLimits()
    if os.name != "posix":
        raise ConfigError(
            "python",
            "this system has no resource limits for processes",
            "Use Linux or macOS, or leave the Python tool out",
        )
    read_end, write_end = os.pipe()
    temporary = tempfile.mkdtemp(prefix="triscale-python-")
    options = json.dumps(
        {
            "status": write_end,
            "strict": limits.strict,
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "seconds": limits.seconds,
        }
    )
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-X",
                "utf8",
                "-c",
                _BOOTSTRAP,
                options,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=str(folder),
                env=_environment(temporary),
                start_new_session=True,
                pass_fds=(write_end,),
            )
        finally:
            os.close(write_end)
        stopped, out, err = await _watch(process, code, limits)
        network = os.read(read_end, 64).decode() or "interpreter"
    finally:
        os.close(read_end)
        shutil.rmtree(temporary, ignore_errors=True)
    if limits.strict and network != "namespace":
        raise ConfigError(
            "python.strict",
            "the kernel gives no network namespace to this user",
            "Allow user namespaces, or set strict to false and accept that hostile code can reach the network",
        )
    status = process.returncode if process.returncode is not None else -signal.SIGKILL
    return SandboxResult(status, out, err, stopped, network)


async def _watch(process, code: str, limits: SandboxLimits) -> tuple[str, str, str]:
    """Feed the code, keep the head of both streams, enforce the time. The group is dead when this returns or raises."""
    out, err = _Head(limits.output_chars), _Head(limits.output_chars)

    async def feed() -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(code.encode("utf-8", "surrogatepass"))
            await process.stdin.drain()
        process.stdin.close()

    stopped = ""
    streams = asyncio.gather(feed(), out.read(process.stdout), err.read(process.stderr))
    try:
        async with asyncio.timeout(limits.seconds):
            await process.wait()
    except TimeoutError:
        stopped = "time"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())
        try:
            async with asyncio.timeout(2.0):  # a process outside the group may hold the pipes open
                await streams
        except TimeoutError:
            pass
    return stopped, out.text(), err.text()


class _Head:
    """Reads a stream to its end and keeps the first ``limit`` characters' worth of bytes: memory stays bounded."""

    def __init__(self, limit: int):
        self.limit, self.kept, self.total = limit, bytearray(), 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(65536):
            self.total += len(chunk)
            self.kept += chunk[: max(0, 4 * self.limit - len(self.kept))]

    def text(self) -> str:
        text = self.kept.decode("utf-8", "replace")
        if len(text) > self.limit or self.total > len(self.kept):
            return text[: self.limit] + f"\n[cut: {self.total} bytes in all]"
        return text


def _environment(temporary: str) -> dict[str, str]:
    keep = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": temporary, "TMPDIR": temporary}
    keep.update(
        {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    )
    return keep
