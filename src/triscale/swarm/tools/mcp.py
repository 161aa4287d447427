"""Tools of MCP servers (stdio or streamable HTTP) from a config file, through the official client.

The file is TOML with ``[servers.NAME]`` tables, or JSON in the shape ``{"mcpServers": {NAME: {...}}}`` that other
programs use. A server has ``command`` (with ``args``, ``env``, ``cwd``) or ``url`` (with ``headers``); both take
``tools`` (names to offer, default all), ``prefix`` (put before every tool name) and ``timeout`` (seconds of one call).
``${NAME}`` in env and headers is replaced from the environment, so keys stay out of the file. Starting a stdio server
runs its command: only use files you trust.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import ConfigError, TriScaleError, from_dict, read_toml, require
from ..types import Outcome, Tool, ToolContext, ToolResult

CONNECT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class McpServerConfig:
    """How to reach one server: ``command`` for stdio, ``url`` for streamable HTTP. See the module's docstring."""

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    prefix: str = ""
    timeout: float | None = None

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("a server needs either `command` (stdio) or `url` (HTTP)")


def read_mcp_config(path: str | Path) -> dict[str, McpServerConfig]:
    """{name: server} of a TOML or JSON file; raises :class:`ConfigError` naming the field that is wrong."""
    file = Path(path)
    if file.suffix.lower() == ".json":
        try:
            tree = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(str(path), "no such file") from error
        except (OSError, ValueError) as error:
            raise ConfigError(str(path), f"is not valid JSON: {error}") from error
        servers, where = tree.get("mcpServers"), "mcpServers"
    else:
        servers, where = read_toml(file).get("servers"), "servers"
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f"{path}.{where}", "no servers", f"Add a table {where}.NAME with `command` or `url`")
    ignored = {"type", "transport", "disabled"}  # fields other programs write
    return {
        name: from_dict(McpServerConfig, {k: v for k, v in values.items() if k not in ignored}, f"{where}.{name}")
        for name, values in servers.items()
        if not (isinstance(values, dict) and values.get("disabled"))
    }


async def mcp_tools(config: str | Path | Mapping[str, McpServerConfig]) -> list[Tool]:
    """Connect to every server and return all their tools.

    Closing all tools ends the connections (and the stdio processes). Raises :class:`TriScaleError` naming the server
    that cannot be reached, after closing the others, and for two tools of one name.
    """
    servers = config if isinstance(config, Mapping) else read_mcp_config(config)
    connections = [McpConnection(name, server) for name, server in servers.items()]
    try:
        listed = await asyncio.gather(*(connection.open() for connection in connections))
        tools: list[Tool] = [tool for group in listed for tool in group]
        names = [tool.name for tool in tools]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"tool {name}", "is offered by two MCP servers", "Give one of them a `prefix`")
    except BaseException:
        await asyncio.gather(*(connection.close() for connection in connections), return_exceptions=True)
        raise
    return tools


class McpConnection:
    """One server. The client lives in one task of its own, as its cancel scopes demand; calls come from any task."""

    def __init__(self, name: str, config: McpServerConfig):
        self.name, self.config = name, config
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._open_tools = 0
        self.client: Any = None

    async def open(self) -> list[McpTool]:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(ready), name=f"mcp {self.name}")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await ready
                tools = [t async for t in self._listed()]
        except TimeoutError as error:
            raise TriScaleError(f"MCP server {self.name!r} did not answer within {CONNECT_SECONDS:g} s") from error
        except TriScaleError:
            raise
        except Exception as error:
            raise TriScaleError(f"MCP server {self.name!r} cannot be used: {_reason(error)}") from error
        unknown = sorted(set(self.config.tools) - {t.name for t in tools})
        if unknown:
            raise ConfigError(
                f"servers.{self.name}.tools",
                f"the server has no tool {unknown[0]!r}",
                f"It offers: {', '.join(sorted(t.name for t in tools)) or 'nothing'}",
            )
        wanted = [t for t in tools if not self.config.tools or t.name in self.config.tools]
        self._open_tools = len(wanted)
        return [McpTool(self, t) for t in wanted]

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        mcp = require("mcp", "swarm", "MCP tools")
        try:
            async with contextlib.AsyncExitStack() as stack:
                self.client = await stack.enter_async_context(
                    mcp.Client(await self._transport(stack), read_timeout_seconds=self.config.timeout)
                )
                ready.set_result(None)
                await self._stop.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error if isinstance(error, Exception) else TriScaleError(str(error)))

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        if self.config.url is not None:
            http = require("mcp.client.streamable_http", "swarm", "MCP servers over HTTP")
            headers = {k: _expand(v, f"servers.{self.name}.headers.{k}") for k, v in self.config.headers.items()}
            client = await stack.enter_async_context(http.create_mcp_http_client(headers=headers or None))
            return http.streamable_http_client(self.config.url, http_client=client)
        stdio = require("mcp.client.stdio", "swarm", "MCP servers over stdio")
        env = {k: _expand(v, f"servers.{self.name}.env.{k}") for k, v in self.config.env.items()}
        silent = stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115 - a server's log must not tear the live view
        parameters = stdio.StdioServerParameters(
            command=self.config.command, args=list(self.config.args), env=env or None, cwd=self.config.cwd
        )
        return stdio.stdio_client(parameters, errlog=silent)

    async def _listed(self):
        cursor = None
        while True:
            page = await self.client.list_tools(cursor=cursor)
            for item in page.tools:
                yield item
            cursor = page.next_cursor
            if not cursor:
                return

    async def release(self) -> None:
        """One tool is closed; the last one ends the connection."""
        self._open_tools -= 1
        if self._open_tools <= 0:
            await self.close()

    async def close(self) -> None:
        self._stop.set()
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=10.0)
            if not done:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class McpTool:
    """One tool of an MCP server. Text content is joined; pictures and other binary content are named, not shown."""

    def __init__(self, connection: McpConnection, listed: Any):
        self._connection, self._remote = connection, listed.name
        self.name: str = connection.config.prefix + listed.name
        self.description: str = listed.description or listed.title or listed.name
        self.parameters: Mapping[str, Any] = listed.input_schema
        self.timeout = connection.config.timeout

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        try:
            result = await self._connection.client.call_tool(self._remote, dict(arguments))
        except Exception as error:
            return ToolResult(f"MCP server {self._connection.name!r}: {_reason(error)}", Outcome.FAILED)
        text = "\n".join(map(_block_text, result.content))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        outcome = Outcome.FAILED if result.is_error else Outcome.COMPLETED
        return ToolResult(text or "[no content]", outcome, data={"server": self._connection.name})

    async def close(self) -> None:
        await self._connection.release()


def _block_text(block: Any) -> str:
    if getattr(block, "type", "") == "text":
        return block.text
    resource = getattr(block, "resource", None)
    if resource is not None and getattr(resource, "text", None) is not None:
        return resource.text
    kind = getattr(block, "mime_type", None) or getattr(block, "type", "content")
    where = getattr(block, "uri", None) or getattr(resource, "uri", None)
    return f"[{kind}{f' at {where}' if where else ''}]"


def _expand(text: str, path: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match.group(1) not in os.environ:
            raise ConfigError(path, f"the environment variable {match.group(1)} is not set", "Export it first")
        return os.environ[match.group(1)]

    return re.sub(r"\$\{(\w+)\}", value, text)


def _reason(error: BaseException) -> str:
    seen: Sequence[BaseException] = [error]
    while isinstance(seen[0], BaseExceptionGroup):  # the client's task groups wrap the cause
        seen = seen[0].exceptions
    return f"{type(seen[0]).__name__}: {seen[0]}"
