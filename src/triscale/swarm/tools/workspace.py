"""Files in the run's workspace: ``read_file``, ``write_file``, ``list_files``.

Paths are walked one folder at a time from the workspace's own file descriptor and no link is ever followed, so a path
cannot leave the workspace, not even when code running in it swaps a folder for a link meanwhile. Files that are not
regular, or that have a second hard link, are refused.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Annotated

from pydantic import Field

from ...config import TriScaleError
from ..types import Outcome, Tool, ToolContext, ToolResult
from .function import FunctionTool

MAX_FILE_BYTES = 4 << 20
MAX_TOTAL_BYTES = 256 << 20
PAGE_CHARS = 20_000


class WorkspaceError(TriScaleError):
    """A path or a file that the workspace refuses; the text says why."""


class Workspace:
    """A folder that agents may read and write.

    max_file_bytes, max_total_bytes: what one file and all files may hold. Raises :class:`WorkspaceError`.
    """

    def __init__(
        self, root: str | Path, *, max_file_bytes: int = MAX_FILE_BYTES, max_total_bytes: int = MAX_TOTAL_BYTES
    ):
        self.root = Path(root)
        self.max_file_bytes, self.max_total_bytes = max_file_bytes, max_total_bytes
        self.root.mkdir(parents=True, exist_ok=True)

    def read(self, path: str) -> str:
        """The text of a file; bytes that are not UTF-8 become U+FFFD."""
        with self._folder(path) as (folder, name):
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except OSError as error:
                raise _refusal(path, error) from error
        with _regular(path, fd, "rb") as file:
            return file.read(self.max_file_bytes).decode("utf-8", "replace")

    def write(self, path: str, text: str, *, append: bool = False) -> int:
        """Write a file, creating folders; returns its size in bytes.

        A replaced file appears at once or not at all. Appending is one write at the end, so agents that append to the
        same file at the same time lose nothing.
        """
        data = text.encode("utf-8", "surrogatepass")
        if self.used() + len(data) > self.max_total_bytes:
            raise WorkspaceError(f"the workspace is full: the limit is {self.max_total_bytes} bytes")
        with self._folder(path, create=True) as (folder, name):
            old = 0
            with contextlib.suppress(FileNotFoundError):
                state = os.stat(name, dir_fd=folder, follow_symlinks=False)
                _check_regular(path, state)
                old = state.st_size if append else 0
            if old + len(data) > self.max_file_bytes:
                raise WorkspaceError(
                    f"{path!r} would hold {old + len(data)} bytes; one file may hold {self.max_file_bytes}"
                )
            try:
                (_append if append else _replace)(folder, name, data)
            except OSError as error:
                raise _refusal(path, error) from error
        return old + len(data)

    def files(self) -> list[tuple[str, int]]:
        """(path, bytes) of every regular file, sorted; links are left out."""
        found = []
        for folder, _, names in os.walk(self.root, followlinks=False):
            for name in names:
                state = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(state.st_mode) and not name.endswith(".partial"):
                    found.append((Path(folder, name).relative_to(self.root).as_posix(), state.st_size))
        return sorted(found)

    def used(self) -> int:
        return sum(size for _, size in self.files())

    @contextlib.contextmanager
    def _folder(self, path: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """(file descriptor of the folder, last name) of ``path``; the descriptor is closed afterwards."""
        *folders, name = _pieces(path)
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, 0o755, dir_fd=fd)
                try:
                    inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                except OSError as error:
                    raise _refusal(path, error) from error
                os.close(fd)
                fd = inner
            yield fd, name
        finally:
            os.close(fd)


def _replace(folder: int, name: str, data: bytes) -> None:
    temporary = f".{secrets.token_hex(8)}.partial"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _append(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=folder)
    with _regular(name, fd, "ab") as file:
        file.write(data)
        file.flush()


def _regular(path: str, fd: int, mode: str) -> IO[bytes]:
    """The open descriptor as a file, after the check that it is a regular one; closed if it is not."""
    try:
        _check_regular(path, os.fstat(fd))
    except WorkspaceError:
        os.close(fd)
        raise
    return open(fd, mode)


def _pieces(path: str) -> tuple[str, ...]:
    pure = PurePosixPath(path)
    pieces = tuple(p for p in pure.parts if p != ".")
    if not pieces or pure.is_absolute() or ".." in pieces or "\0" in path or "\\" in path:
        raise WorkspaceError(f"{path!r} is not a path inside the workspace; write it like 'notes/a.md'")
    if any(len(piece.encode("utf-8", "surrogatepass")) > 255 for piece in pieces) or len(pieces) > 32:
        raise WorkspaceError(f"the path {path[:60]!r}... is too long")
    return pieces


def _check_regular(path: str, state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise WorkspaceError(f"{path!r} is not a regular file")
    if state.st_nlink > 1:
        raise WorkspaceError(f"{path!r} is refused: the same file has another name, maybe outside the workspace")


def _refusal(path: str, error: OSError) -> WorkspaceError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return WorkspaceError(f"{path!r} goes through a link or a file; links are not followed")
    if error.errno == errno.ENOENT:
        return WorkspaceError(f"{path!r} does not exist in the workspace")
    return WorkspaceError(f"{path!r}: {error.strerror or error}")


def workspace_tools(workspace: Workspace | None = None) -> list[Tool]:
    """The tools ``read_file``, ``write_file``, ``list_files``; without ``workspace`` they use the run's own folder."""

    def of(context: ToolContext) -> Workspace:
        if workspace is not None:
            return workspace
        if context.workspace is None:
            raise WorkspaceError("this run has no workspace")
        return Workspace(context.workspace)

    def read_file(
        context: ToolContext,
        path: Annotated[str, Field(description="path inside the workspace, for example notes/a.md")],
        offset: Annotated[int, Field(ge=0, description="character to start from")] = 0,
    ) -> ToolResult:
        """Read a file of the shared workspace."""
        text = of(context).read(path)
        page = text[offset : offset + PAGE_CHARS]
        rest = len(text) - offset - len(page)
        more = f"\n[{rest} more characters: read with offset={offset + len(page)}]" if rest > 0 else ""
        return ToolResult(page + more or "[empty]", evidence=(f"workspace:{path}",))

    def write_file(
        context: ToolContext,
        path: Annotated[str, Field(description="path inside the workspace")],
        text: str,
        append: Annotated[bool, Field(description="add to the end instead of replacing")] = False,
    ) -> str:
        """Write a file of the shared workspace; other agents of this run can read it."""
        return f"{path} holds {of(context).write(path, text, append=append)} bytes"

    def list_files(context: ToolContext) -> str:
        """List the files of the shared workspace with their sizes in bytes."""
        return "\n".join(f"{size:>10} {name}" for name, size in of(context).files()) or "the workspace is empty"

    return [FunctionTool(_refusing(f)) for f in (read_file, write_file, list_files)]


def _refusing(function):
    """A refusal of the workspace is an answer to the model, not a crash."""

    @functools.wraps(function)
    def wrapped(**values):
        try:
            return function(**values)
        except WorkspaceError as error:
            return ToolResult(str(error), Outcome.FAILED)

    return wrapped
