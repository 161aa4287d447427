"""Checkpoints: safetensors and JSON, complete or absent.

A checkpoint is written under a temporary name, flushed to disk, renamed, and only then marked COMPLETE; the latest is
the newest *complete* one by step number. The marker lists the sha256 of every file (``sha256sum -c COMPLETE`` checks it
too), so that a flipped bit is found before it is trained on. Nothing is pickled.

One process writes ``model.safetensors``, ``optimizer.safetensors`` and ``rng.safetensors``; of several, each writes its
own part (:mod:`.sharded`). Either is read by any number of processes, and by every command.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from triscale.config import TriScaleError

from .distributed import ALONE, World
from .sharded import Groups, is_sharded, own_files, read_shards, write_shards

MARKER = "COMPLETE"


class CheckpointError(TriScaleError):
    """A checkpoint cannot be written or read; the message says what to do."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a complete checkpoint folder."""
    return (path / MARKER).exists() and ((path / "model.safetensors").exists() or is_sharded(path))


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint, oldest first; unfinished ones are not listed."""
    found = []
    for path in folder.glob("step_*") if folder.exists() else ():
        number = path.name.removeprefix("step_")
        if number.isdigit() and (path / MARKER).exists():
            found.append((int(number), path))
    return sorted(found)


def remove_unfinished(folder: Path) -> list[str]:
    """Delete what an interrupted save left behind; returns the names for a log line."""
    removed = []
    for path in sorted(folder.glob("*step_*")) if folder.exists() else ():
        if path.is_dir() and not (path / MARKER).exists():
            shutil.rmtree(path)
            removed.append(path.name)
    return removed


def save_checkpoint(folder: Path, step: int, tensors: Groups, state: dict[str, Any], world: World = ALONE) -> Path:
    """Write ``tensors`` (file stem -> tensors) and ``state`` (JSON) as the checkpoint of ``step``.

    Every rank of ``world`` must call; the first one's ``state`` counts. Raises :class:`CheckpointError` when the disk is
    full; earlier checkpoints stay untouched.
    """
    target = checkpoint_path(folder, step)
    if (target / MARKER).exists():
        return target
    temporary = folder / f".tmp_step_{step:08d}"
    try:
        with world.in_turn():
            if world.first:
                for stale in (temporary, target):
                    if stale.exists():
                        shutil.rmtree(stale)
                temporary.mkdir(parents=True)
        if world.size > 1:
            write_shards(temporary, tensors)
        else:
            for stem, content in tensors.items():
                save_file({k: v.detach().contiguous() for k, v in content.items()}, temporary / f"{stem}.safetensors")
        mine = own_files(temporary, world.rank) if world.size > 1 else sorted(temporary.iterdir())
        digests = [line for lines in world.gather([_line(file) for file in mine]) for line in lines]
        with world.in_turn():
            if world.first:
                _complete(temporary, target, digests, state)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error)
        hint = "free some space and start the run again: it resumes from the last complete checkpoint"
        raise CheckpointError(
            f"cannot save step {step} in {folder}: {'the disk is full' if full else error}; {hint}"
        ) from error
    return target


def _complete(temporary: Path, target: Path, digests: list[str], state: dict[str, Any]) -> None:
    (temporary / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))
    digests = [*digests, _line(temporary / "state.json")]
    for file in temporary.iterdir():
        _sync(file)
    _sync(temporary)
    temporary.rename(target)
    _sync(target.parent)
    (target / f".{MARKER}").write_text("".join(digests))
    _sync(target / f".{MARKER}")
    (target / f".{MARKER}").rename(target / MARKER)
    _sync(target)


def load_checkpoint(
    path: Path, world: World = ALONE, layouts: dict[str, Tensor] | None = None, only: tuple[str, ...] = ()
) -> tuple[Groups, dict[str, Any]]:
    """The tensors by file stem, and the state. With several ranks in ``world`` every one must call.

    layouts: with several ranks, the parameters by name; tensors come sharded like them. only: the stems to read, all if
    empty. Raises :class:`CheckpointError` on a missing or damaged file, on every rank.
    """
    try:
        problem = None
        try:
            lines = (path / MARKER).read_text().splitlines()
            for line in lines[world.rank :: world.size]:
                digest, _, name = line.partition("  ")
                if _digest(path / name) != digest:
                    raise ValueError(f"{name} is not what was saved (its sha256 differs)")
            state = json.loads((path / "state.json").read_text())
        except Exception as error:
            problem = str(error)
        for told in world.gather(problem):
            if told is not None:
                raise ValueError(told)
        if world.size > 1 or is_sharded(path):
            return read_shards(path, world, layouts, only), state
        files = [file for file in sorted(path.glob("*.safetensors")) if not only or file.stem in only]
        return {file.stem: load_file(file) for file in files}, state
    except Exception as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; delete that folder to resume from the one before"
        ) from error


def prune(folder: Path, keep: int, protected: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Delete all but the newest ``keep`` complete checkpoints and the ``protected`` steps."""
    for step, path in complete_checkpoints(folder)[: -max(1, keep)]:
        if step not in protected:
            (path / MARKER).unlink()
            shutil.rmtree(path)


def _line(file: Path) -> str:
    return f"{_digest(file)}  {file.name}\n"


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def pack_optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimizer state as named tensors and JSON. ``names`` maps ``id(parameter)`` to its full name."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}|{key}"] = value
            else:
                scalars[f"{name}|{key}"] = value
    groups = [{k: v for k, v in group.items() if _is_json(v)} for group in optimizer.param_groups]
    return tensors, {"scalars": scalars, "groups": groups}


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[int, str], tensors: dict[str, Tensor], packed: dict[str, Any]
) -> None:
    """Restore what :func:`pack_optimizer` saved into an optimizer over the same parameters."""
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("|")
        parameter = parameters[name]
        optimizer.state[parameter][entry] = value.to(parameter.device) if value.dim() else value
    for key, value in packed["scalars"].items():
        name, _, entry = key.rpartition("|")
        optimizer.state[parameters[name]][entry] = value
    for group, saved in zip(optimizer.param_groups, packed["groups"], strict=True):
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved.items()})


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
