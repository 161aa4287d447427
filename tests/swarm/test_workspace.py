import asyncio
import contextlib
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.swarm.tools import Workspace, WorkspaceError, workspace_tools
from triscale.swarm.types import Outcome, ToolContext

BAD_PATHS = ["", ".", "/etc/passwd", "../x", "a/../../x", "a/..", "..", "a\\b", "x\0y", "a/" * 40 + "b", "n" * 300]


@pytest.fixture
def space(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    return Workspace(tmp_path / "work")


@pytest.mark.parametrize("path", BAD_PATHS)
def test_paths_that_leave_the_workspace_are_refused(space, path):
    for act in (space.read, lambda p: space.write(p, "x"), lambda p: space.write(p, "x", append=True)):
        with pytest.raises(WorkspaceError):
            act(path)


def test_links_of_every_kind_are_refused(space, tmp_path):
    os.symlink(tmp_path / "secret.txt", space.root / "file_link")
    os.symlink(tmp_path, space.root / "folder_link")
    os.symlink("missing_target", space.root / "dangling")
    os.link(tmp_path / "secret.txt", space.root / "hard")
    os.mkfifo(space.root / "pipe")
    (space.root / "folder").mkdir()
    for path in ("file_link", "folder_link/secret.txt", "dangling", "hard", "pipe", "folder"):
        with pytest.raises(WorkspaceError):
            space.read(path)
        for append in (False, True):
            if path in ("file_link", "dangling"):
                with pytest.raises(WorkspaceError):
                    space.write(path, "overwritten", append=append)
            else:
                with pytest.raises(WorkspaceError):
                    space.write(path, "overwritten", append=append)
    assert (tmp_path / "secret.txt").read_text() == "secret"
    assert not (tmp_path / "missing_target").exists() and not (space.root / "missing_target").exists()
    assert space.files() == [("hard", 6)]


def test_a_folder_swapped_for_a_link_meanwhile_does_not_leak(space, tmp_path):
    """The race that path checks lose: the walk uses descriptors, so a swap gives a refusal or the right file."""
    space.write("d/secret.txt", "inside")
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            os.rename(space.root / "d", space.root / "hidden")
            os.symlink(tmp_path, space.root / "d")
            os.unlink(space.root / "d")
            os.rename(space.root / "hidden", space.root / "d")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(300):
            with contextlib.suppress(WorkspaceError):
                assert space.read("d/secret.txt") == "inside"
    finally:
        stop.set()
        thread.join()


def test_reading_back_what_was_written(space):
    assert space.write("notes/a.md", "héllo") == 6
    assert space.write("notes/a.md", "!", append=True) == 7
    assert space.write("notes/./b.md", "x") == 1
    assert space.read("notes/a.md") == "héllo!"
    assert space.files() == [("notes/a.md", 7), ("notes/b.md", 1)]


def test_sizes_are_limited(tmp_path):
    space = Workspace(tmp_path, max_file_bytes=10, max_total_bytes=15)
    space.write("a", "0123456789")
    with pytest.raises(WorkspaceError, match="one file may hold 10"):
        space.write("a", "x", append=True)
    with pytest.raises(WorkspaceError, match="full"):
        space.write("b", "012345")
    assert space.read("a") == "0123456789"


def test_concurrent_appends_lose_nothing(space):
    def append(i):
        for _ in range(20):
            space.write("log", f"{i}\n", append=True)

    threads = [threading.Thread(target=append, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(space.read("log").split()) == sorted(str(i) for i in range(4) for _ in range(20))


def test_tools_answer_with_the_reason(space):
    read, write, list_ = workspace_tools()
    context = ToolContext(agent="main", call="c", workspace=space.root)

    async def go():
        assert (await list_.call({}, context)).content == "the workspace is empty"
        assert "holds 2 bytes" in (await write.call({"path": "a.txt", "text": "hi"}, context)).content
        got = await read.call({"path": "a.txt"}, context)
        assert got.content == "hi" and got.evidence == ("workspace:a.txt",)
        refused = await read.call({"path": "../secret.txt"}, context)
        assert refused.outcome is Outcome.FAILED and "inside the workspace" in refused.content
        lost = await read.call({"path": "a.txt"}, ToolContext(agent="main", call="c"))
        assert lost.outcome is Outcome.FAILED and "no workspace" in lost.content

    asyncio.run(go())


piece = st.sampled_from(["..", ".", "a", "link", "/", "", "b", "\0", "~"])


@settings(deadline=None, max_examples=60)
@given(st.lists(piece, max_size=6).map("/".join))
def test_nothing_outside_changes_whatever_the_path(tmp_path_factory, path):
    base = tmp_path_factory.mktemp("w")
    space = Workspace(base / "in")
    os.symlink(base, space.root / "link")
    with contextlib.suppress(WorkspaceError):
        space.write(path, "x")
    assert sorted(os.listdir(base)) == ["in"]
