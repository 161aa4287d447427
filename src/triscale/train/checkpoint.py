"""Checkpoints: safetensors and JSON, complete or absent.

A checkpoint is written under a temporary name, flushed to disk, renamed, and only then marked COMPLETE; the latest is
the newest *complete* one by step number. The marker lists the sha256 of every file (``sha256sum -c COMPLETE`` checks it
too), so that a flipped bit is found before it is trained on. Nothing is pickled.
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

from .distributed import like

MARKER = "COMPLETE"


class CheckpointError(TriScaleError):
    """A checkpoint cannot be written or read; the message says what to do."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


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


def save_checkpoint(folder: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write ``tensors`` (file stem -> tensors) and ``state`` (JSON) as the checkpoint of ``step``.

    Raises :class:`CheckpointError` when the disk is full; earlier checkpoints stay untouched.
    """
    target = checkpoint_path(folder, step)
    if (target / MARKER).exists():
        return target
    temporary = folder / f".tmp_step_{step:08d}"
    try:
        for stale in (temporary, target):
            if stale.exists():
                shutil.rmtree(stale)
        temporary.mkdir(parents=True)
        for stem, content in tensors.items():
            save_file({k: v.detach().contiguous() for k, v in content.items()}, temporary / f"{stem}.safetensors")
        (temporary / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))
        digests = [f"{_digest(file)}  {file.name}\n" for file in sorted(temporary.iterdir())]
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        temporary.rename(target)
        _sync(folder)
        (target / f".{MARKER}").write_text("".join(digests))
        _sync(target / f".{MARKER}")
        (target / f".{MARKER}").rename(target / MARKER)
        _sync(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error)
        hint = "free some space and start the run again: it resumes from the last complete checkpoint"
        raise CheckpointError(
            f"cannot save step {step} in {folder}: {'the disk is full' if full else error}; {hint}"
        ) from error
    return target


def load_checkpoint(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors by file stem, and the state; raises :class:`CheckpointError` on a missing or damaged file."""
    try:
        for line in (path / MARKER).read_text().splitlines():
            digest, _, name = line.partition("  ")
            if _digest(path / name) != digest:
                raise ValueError(f"{name} is not what was saved (its sha256 differs)")
        tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
        return tensors, json.loads((path / "state.json").read_text())
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
        value = like(parameter, value.to(parameter.device)) if value.dim() else value
        optimizer.state[parameter][entry] = value
    for key, value in packed["scalars"].items():
        name, _, entry = key.rpartition("|")
        optimizer.state[parameters[name]][entry] = value
    for group, saved in zip(optimizer.param_groups, packed["groups"], strict=True):
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved.items()})


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
