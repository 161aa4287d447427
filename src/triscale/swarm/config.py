"""The typed configuration of a swarm run, and how it becomes a :class:`~triscale.swarm.orchestrator.Swarm`.

A run's folder holds the resolved ``config.toml``; ``triscale swarm resume`` builds the same swarm from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from triscale.config import (
    ConfigError,
    Parts,
    dump_toml,
    from_dict,
    overlay,
    read_toml,
    refuse_untrusted_kinds,
    to_dict,
)

from .client_chaos import Chaos, ChaosClient
from .limiter import Limiters, RetryPolicy
from .limits import Limits
from .orchestrator import Swarm
from .runtime import Sampling
from .types import ModelClient, Tool, World

CLIENTS = Parts(
    "model client",
    {
        "http": "triscale.swarm.client_http:HttpClient",
        "echo": "triscale.swarm.client_scripted:EchoClient",
    },
)


def _client() -> Any:
    return field(default=None, metadata={"parts": CLIENTS, "default_kind": "http"})


@dataclass(frozen=True, kw_only=True)
class ToolsConfig:
    """Tools besides the documents': workspace = read and write files of the run's folder; python = run Python in a
    limited subprocess; mcp = a file that names MCP servers."""

    workspace: bool = False
    python: bool = False
    mcp: str | None = None


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """task: the question. docs: a folder to search. world: a generated look-up world instead (``wide:entities=100``);
    it brings question, tools, scripted models and a score. model, subagent: model clients; the sub-agents' is the
    orchestrator's if left out, and both are the world's scripts if neither is given. chaos: failures to inject.
    virtual: run on the virtual clock (only with clients and tools that do no I/O). ray: sub-agents run as Ray tasks,
    each claiming ray_cpus processors of the cluster.
    """

    task: str = ""
    docs: str | None = None
    world: str | None = None
    mode: Literal["swarm", "single"] = "swarm"
    model: Any = _client()
    subagent: Any = _client()
    system_prompt: str | None = None
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    retries: RetryPolicy = RetryPolicy()
    tools: ToolsConfig = ToolsConfig()
    chaos: Chaos | None = None
    chaos_seed: int = 0
    virtual: bool = False
    ray: bool = False
    ray_cpus: float = 0.25

    def __post_init__(self) -> None:
        if self.world is None and not self.task.strip():
            raise ConfigError("task", "there is no question", 'Write triscale swarm run "your question"')
        if self.world is None and self.model is None:
            raise ConfigError("model", "no model is named", "Add --model NAME --base-url URL (or --world for a script)")
        if self.limits.cost is not None:
            for name in ("model", "subagent"):
                if getattr(getattr(self, name), "prices", None) == (0.0, 0.0, 0.0):
                    raise ConfigError("limits.cost", f"cannot be enforced: {name}.prices is not set",
                                      f"Add --{name}.prices=[input,output,cached] for a million tokens")  # fmt: skip
        if self.virtual and any(type(c).__module__.endswith("client_http") for c in (self.model, self.subagent)):
            raise ConfigError("virtual", "an HTTP endpoint needs real time", "Leave --virtual out")


def load_config(
    file: Path | None, over: dict[str, Any], *, base: dict[str, Any] | None = None, trust_imports: bool = False
) -> SwarmConfig:
    """A typed config from a file (or ``base``) with overrides laid over it."""
    tree = base or {}
    if file is not None:
        tree = read_toml(file)
        if not trust_imports:
            refuse_untrusted_kinds(tree, str(file))
    return from_dict(SwarmConfig, overlay(tree, over))


def save_config(config: SwarmConfig, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.toml").write_text(dump_toml(to_dict(config)), encoding="utf-8")


@dataclass
class Prepared:
    """A swarm ready to run, its question, and the world it was made from, if any."""

    swarm: Swarm
    task: str
    world: World | None


async def prepare(
    config: SwarmConfig, directory: Path | None, listeners: tuple[Callable[[dict[str, Any]], None], ...] = ()
) -> Prepared:
    """Build clients and tools (reading documents, connecting MCP servers) and put the swarm together."""
    world = build_world(config)
    main, sub = build_clients(config, world)
    tools = await build_tools(config, world)
    for client in (main, sub):  # last, since it opens connections and nothing after it can fail
        discover = getattr(client, "discover", None)
        if discover is not None:
            await discover()
    swarm = Swarm(
        client=main, subagent_client=sub, tools=tools, limits=config.limits, system_prompt=config.system_prompt,
        directory=directory, mode=config.mode, sampling=config.sampling, listeners=listeners, world=config.world,
        limiters=Limiters(config.limits.concurrent, config.retries), remote=_remote(config),
    )  # fmt: skip
    return Prepared(swarm, config.task or (world.question if world is not None else ""), world)


def build_world(config: SwarmConfig) -> World | None:
    """The generated world of a config, if it names one."""
    if config.world is None:
        return None
    from .worlds import make_world

    return make_world(config.world)


def build_clients(config: SwarmConfig, world: World | None) -> tuple[ModelClient, ModelClient]:
    """The orchestrator's client and the sub-agents' (which may be one object)."""
    if config.model is not None:
        main = config.model.build()
    else:
        assert world is not None
        main = world.scripted("orchestrator" if config.mode == "swarm" else "single")
    if config.subagent is not None:
        sub = config.subagent.build()
    else:
        sub = main if config.model is not None or world is None else world.scripted("subagent")
    if config.chaos is not None:
        same = sub is main
        main = ChaosClient(main, config.chaos, config.chaos_seed)
        sub = main if same else ChaosClient(sub, config.chaos, config.chaos_seed + 1)
    return main, sub


async def build_tools(config: SwarmConfig, world: World | None, *, index: Any = None) -> list[Tool]:
    """All direct tools; ``index`` replaces indexing the documents' folder anew."""
    tools: list[Tool] = list(world.tools) if world is not None else []
    if config.docs is not None:
        from .tools import document_tools

        tools += document_tools(index or config.docs, thread=not config.virtual)
    if config.tools.workspace:
        from .tools import workspace_tools

        tools += workspace_tools()
    if config.tools.python:
        from .tools import python_tool

        tools.append(python_tool())
    if config.tools.mcp is not None:
        from .tools import mcp_tools

        tools += await mcp_tools(config.tools.mcp)
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            for tool in tools:
                await tool.close()
            raise ConfigError(f"tool {name}", "is defined twice", "Leave one of its sources out, or give it a prefix")
    return tools


def _remote(config: SwarmConfig) -> Any:
    if not config.ray:
        return None
    from .ray_runner import RayRunner

    return RayRunner(config)
