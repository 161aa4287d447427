"""Tools for agents: documents, a workspace, Python, MCP servers, and any typed Python function."""

from importlib import import_module

_WHERE = {
    "DocumentIndex": "documents", "document_tools": "search", "FunctionTool": "function", "tool": "function",
    "McpServerConfig": "mcp", "mcp_tools": "mcp", "read_mcp_config": "mcp", "SandboxLimits": "sandbox",
    "SandboxResult": "sandbox", "python_tool": "python", "run_python": "sandbox", "Workspace": "workspace",
    "WorkspaceError": "workspace", "workspace_tools": "workspace",
}  # fmt: skip
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
