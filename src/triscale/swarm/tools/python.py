"""The ``python`` tool: code in the sandbox of :mod:`.sandbox`, inside the run's workspace."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..types import Outcome, Tool, ToolContext, ToolResult
from .function import FunctionTool
from .sandbox import NOT_PROTECTED, SandboxLimits, SandboxResult, run_python


def python_tool(limits: SandboxLimits | None = None) -> Tool:
    """A tool that runs Python code with ``limits``; without a workspace each call gets a folder of its own.

    What the limits do not protect against is :data:`triscale.swarm.tools.sandbox.NOT_PROTECTED`.
    """
    bounds = limits or SandboxLimits()

    async def python(
        context: ToolContext, code: Annotated[str, Field(description="a whole program; print() what you want to see")]
    ) -> ToolResult:
        """Run a Python program and return what it prints."""
        now = bounds
        if context.remaining_seconds is not None:  # end before the runtime's own timeout does, and say why
            now = dataclasses.replace(bounds, seconds=max(0.1, min(bounds.seconds, context.remaining_seconds - 1.0)))
        if context.workspace is not None:
            context.workspace.mkdir(parents=True, exist_ok=True)
            return _answer(await run_python(code, context.workspace, now), now)
        with tempfile.TemporaryDirectory(prefix="triscale-python-") as folder:
            return _answer(await run_python(code, Path(folder), now), now)

    description = (
        f"Run a Python program in the workspace and return what it prints. Each call is a new process without network; "
        f"limits: {bounds.seconds:g} s, {bounds.memory_mb} MB of memory, {bounds.file_mb} MB a file."
    )
    return FunctionTool(python, description=description, timeout=bounds.seconds + 5.0)


def _answer(result: SandboxResult, limits: SandboxLimits) -> ToolResult:
    outcome = Outcome.COMPLETED
    if result.stopped == "time":
        outcome = Outcome.TIMED_OUT
    elif result.code:
        outcome = Outcome.FAILED
    return ToolResult(result.text(limits), outcome, data={"exit": result.code, "network": result.network})


__all__ = ["NOT_PROTECTED", "SandboxLimits", "python_tool"]
