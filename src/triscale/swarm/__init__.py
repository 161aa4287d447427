"""Agent swarms: an orchestrator, sub-agents in parallel, and a ledger of what each was worth. Never imports torch."""

from importlib import import_module

_WHERE = {
    "Chaos": "client_chaos", "ChaosClient": "client_chaos", "EchoClient": "client_scripted", "HttpClient": "client_http",
    "Limiters": "limiter", "Limits": "limits", "Message": "types", "ModelClient": "types", "ModelError": "types",
    "ModelReply": "types", "ModelRequest": "types", "Outcome": "types", "PolicyClient": "client_scripted",
    "Sampling": "runtime", "ScriptedClient": "client_scripted", "Swarm": "orchestrator", "SwarmResult": "orchestrator",
    "Tool": "types", "ToolCall": "types", "ToolResult": "types", "ToolSpec": "types", "Usage": "types",
}  # fmt: skip
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
