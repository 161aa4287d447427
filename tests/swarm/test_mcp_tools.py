import asyncio
import socket
import sys
import textwrap

import pytest

from triscale.config import ConfigError, TriScaleError
from triscale.swarm.tools import mcp_tools, read_mcp_config
from triscale.swarm.types import Outcome, ToolContext

pytest.importorskip("mcp")
CONTEXT = ToolContext(agent="main", call="c")
SERVER = textwrap.dedent("""
    import os, sys
    from mcp.server import MCPServer
    server = MCPServer("lookup")

    @server.tool()
    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    @server.tool()
    def secret() -> str:
        "Tell the key."
        return os.environ.get("LOOKUP_KEY", "none")

    @server.tool()
    def fail() -> str:
        "Always fail."
        raise RuntimeError("no luck")

    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
""")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


def write_config(tmp_path, text):
    path = tmp_path / "mcp.toml"
    path.write_text(textwrap.dedent(text))
    return path


async def use_all(tools):
    by_name = {t.name: t for t in tools}
    try:
        added = await by_name["m_add"].call({"a": 2, "b": 40}, CONTEXT)
        failed = await by_name["m_fail"].call({}, CONTEXT)
        missing = await by_name["m_add"].call({"a": 2}, CONTEXT)
        many = await asyncio.gather(*(by_name["m_add"].call({"a": i, "b": i}, CONTEXT) for i in range(10)))
        secret = await by_name["m_secret"].call({}, CONTEXT)
    finally:
        for item in tools:
            await item.close()
    assert added.content == "42" and added.outcome is Outcome.COMPLETED
    assert failed.outcome is Outcome.FAILED and missing.outcome is Outcome.FAILED
    assert [r.content for r in many] == [str(2 * i) for i in range(10)]
    return secret.content


def test_a_stdio_server(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k-123")
    config = write_config(tmp_path, f"""
        [servers.lookup]
        command = {sys.executable!r}
        args = [{str(server)!r}]
        env = {{ LOOKUP_KEY = "${{MY_KEY}}" }}
        prefix = "m_"
    """)  # fmt: skip

    async def go():
        tools = await mcp_tools(config)
        add = next(t for t in tools if t.name == "m_add")
        assert add.description == "Add two numbers." and set(add.parameters["required"]) == {"a", "b"}
        return await use_all(tools)

    assert asyncio.run(go()) == "k-123"


def test_an_http_server(server, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def go():
        process = await asyncio.create_subprocess_exec(sys.executable, str(server), str(port), stderr=-3, stdout=-3)
        try:
            for _ in range(200):
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
            config = write_config(tmp_path, f'[servers.h]\nurl = "http://127.0.0.1:{port}/mcp"\nprefix = "m_"')
            return await use_all(await mcp_tools(config))
        finally:
            process.kill()
            await process.wait()

    assert asyncio.run(go()) == "none"


def test_only_the_named_tools_are_offered(server, tmp_path):
    text = f"[servers.a]\ncommand = {sys.executable!r}\nargs = [{str(server)!r}]\ntools = [%s]"

    async def go(names):
        tools = await mcp_tools(write_config(tmp_path, text % names))
        for item in tools:
            await item.close()
        return [t.name for t in tools]

    assert asyncio.run(go("'add'")) == ["add"]
    with pytest.raises(ConfigError, match=r"servers\.a\.tools.*'sum'"):
        asyncio.run(go("'sum'"))


def test_a_server_that_cannot_start_is_named_and_nothing_is_left(server, tmp_path):
    config = write_config(tmp_path, f"""
        [servers.good]
        command = {sys.executable!r}
        args = [{str(server)!r}]
        [servers.bad]
        command = "/no/such/program"
    """)  # fmt: skip

    async def go():
        with pytest.raises(TriScaleError, match="'bad'"):
            await mcp_tools(config)
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(go()) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.toml", "[servers.x]\nargs = []", "command"),
        ("a.toml", "[servers.x]\ncommand = 'a'\nurl = 'b'", "command"),
        ("a.toml", "[servers.x]\ncomand = 'a'", "Did you mean 'command'"),
        ("a.toml", "title = 'x'", "no servers"),
        ("a.json", '{"mcpServers": {"x": {"command": 1}}}', "expected str"),
        ("a.json", "{", "not valid JSON"),
    ],
)
def test_config_mistakes_are_named(tmp_path, name, text, problem):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_mcp_config(tmp_path / name)


def test_the_json_form_of_other_programs_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"mcpServers": {"x": {"type": "stdio", "command": "c", "args": ["-y"]}}}')
    assert read_mcp_config(tmp_path / "a.json")["x"].args == ("-y",)


def test_an_unset_key_is_named(server, tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    config = write_config(tmp_path, "[servers.x]\ncommand = 'c'\nenv = { K = '${NOT_THERE}' }")
    with pytest.raises(ConfigError, match="NOT_THERE"):
        asyncio.run(mcp_tools(config))
