import asyncio
import os
import sys
import time

import pytest

from triscale.config import ConfigError
from triscale.swarm.tools import SandboxLimits, python_tool, run_python
from triscale.swarm.types import Outcome, ToolContext

pytestmark = pytest.mark.skipif(os.name != "posix", reason="resource limits are POSIX")


def run(code, folder, **limits):
    return asyncio.run(run_python(code, folder, SandboxLimits(**limits)))


def alive(marker: str) -> list[str]:
    """Command lines of living processes whose environment or arguments hold ``marker`` (Linux)."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read().decode(errors="replace")
        except OSError:
            continue
        if marker in line:
            found.append(line)
    return found


def test_output_errors_and_exit_codes(tmp_path):
    assert run("print(6 * 7)", tmp_path).stdout == "42\n"
    failed = run("x = 1\nboom(x)", tmp_path)
    assert failed.code == 1 and "boom(x)" in failed.stderr and "NameError" in failed.stderr
    assert run("raise SystemExit(3)", tmp_path).code == 3
    assert run("import sys; print(repr(sys.stdin.read()))", tmp_path).stdout == "''\n"


def test_time_limit_kills_and_keeps_the_output(tmp_path):
    begin = time.monotonic()
    result = run("print('before', flush=True)\nwhile True: pass", tmp_path, seconds=0.5)
    assert result.stopped == "time" and result.stdout == "before\n"
    assert time.monotonic() - begin < 10


def test_memory_and_file_size_limits(tmp_path):
    assert "MemoryError" in run("x = bytearray(10**10)", tmp_path, memory_mb=256).stderr
    big = run("open('big', 'wb').write(bytes(3 << 20))", tmp_path, file_mb=1)
    assert big.code == 1 and "File too large" in big.stderr
    assert (tmp_path / "big").stat().st_size <= 1 << 20


def test_no_network_and_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    code = "import os, socket\nprint('KEY' in str(os.environ))\nsocket.create_connection(('127.0.0.1', 9))"
    result = run(code, tmp_path)
    assert result.stdout == "False\n" and "PermissionError" in result.stderr
    if result.network == "namespace":  # also where Python's own hooks do not reach
        devices = run("print(open('/proc/net/dev').read().count(':'))", tmp_path)
        raw = "import _socket, ctypes\nl = ctypes.CDLL(None)\ns = l.socket(2, 1, 0)\n"
        raw += "print(l.connect(s, bytes([2, 0, 0, 80, 127, 0, 0, 1] + [0] * 8), 16))"
        assert run(raw, tmp_path).stdout == "-1\n" and int(devices.stdout) <= 1


@pytest.mark.skipif(sys.platform != "linux", reason="process namespaces are Linux")
def test_a_process_that_leaves_the_group_dies_too(tmp_path):
    marker = f"sleeper{os.getpid()}"
    code = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{marker}'], start_new_session=True)\n"
        "print('started')"
    )
    result = run(code, tmp_path)
    if result.network != "namespace":
        pytest.skip("no user namespaces here")
    assert result.stdout == "started\n"
    time.sleep(0.2)
    assert alive(marker) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cancelling_kills_the_code(tmp_path):
    marker = f"{tmp_path}/alive"
    code = f"import time\nfor i in range(600):\n    open({marker!r}, 'w').write(str(i))\n    time.sleep(0.05)"

    async def go():
        task = asyncio.create_task(run_python(code, tmp_path, SandboxLimits(seconds=60)))
        while not os.path.exists(marker):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    first = (tmp_path / "alive").read_text()
    time.sleep(0.3)
    assert (tmp_path / "alive").read_text() == first


def test_long_output_is_cut_and_counted(tmp_path):
    result = run("print('y' * 100_000)", tmp_path, output_chars=50)
    assert result.stdout.startswith("y" * 50 + "\n[cut: 100001 bytes")


def test_the_tool_works_in_the_workspace_and_names_its_outcome(tmp_path):
    item = python_tool(SandboxLimits(seconds=0.5))
    context = ToolContext(agent="main", call="c", workspace=tmp_path / "w")

    async def go():
        good = await item.call({"code": "open('a', 'w').write('1'); print(open('a').read())"}, context)
        assert good.content == "1" and good.outcome is Outcome.COMPLETED
        bad = await item.call({"code": "1/0"}, context)
        assert bad.outcome is Outcome.FAILED and "ZeroDivisionError" in bad.content
        slow = await item.call({"code": "import time; time.sleep(9)"}, context)
        assert slow.outcome is Outcome.TIMED_OUT and "0.5 s" in slow.content
        mute = await item.call({"code": "x = 1"}, ToolContext(agent="main", call="c"))
        assert "no output" in mute.content

    asyncio.run(go())
    assert (tmp_path / "w" / "a").read_text() == "1"
    assert "0.5 s" in item.description


def test_limits_must_be_positive():
    with pytest.raises(ConfigError, match=r"python\.seconds"):
        SandboxLimits(seconds=0)
