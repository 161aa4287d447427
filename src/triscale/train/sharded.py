"""Checkpoints of several processes, through torch.distributed.checkpoint: each rank writes and reads only its part.

The files are safetensors (``shard-00001-...`` is the first rank's), each piece with its place in the whole tensor, so any
number of processes can read what any other number wrote. Whole safetensors files are read by the same code. A tensor has
the same name in both: a parameter's name, ``name|entry`` for the optimizer's state of it, ``torch`` for the generator.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .distributed import World

Groups = dict[str, dict[str, Tensor]]  # tensors by the file stem a single process keeps them under


def is_sharded(path: Path) -> bool:
    """Whether several processes wrote the checkpoint in ``path``."""
    return any(path.glob("shard-*.safetensors"))


def own_files(path: Path, rank: int) -> list[Path]:
    """What this rank wrote into ``path``."""
    return sorted(path.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def write_shards(path: Path, groups: Groups) -> None:
    """Write the pieces of this rank into the existing folder ``path``; every rank must call."""
    import torch.distributed.checkpoint as dcp

    tensors = {name: tensor.detach() for group in groups.values() for name, tensor in group.items()}
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
    _unwrapped(lambda: dcp.save(tensors, storage_writer=writer))


def read_shards(
    path: Path, world: World, layouts: dict[str, Tensor] | None = None, only: tuple[str, ...] = ()
) -> Groups:
    """The tensors of a checkpoint of either format; with several ranks in ``world`` every one must call.

    layouts: parameters by name. Where one is sharded, it and the optimizer state of its shape come sharded likewise and
    each rank reads its own piece; the rest comes whole. only: the groups to read, all if empty.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(path))
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: _empty_like(entry, (layouts or {}).get(name.partition("|")[0]))
        for name, entry in stored.items()
        if not only or _group(name) in only
    }
    _unwrapped(lambda: dcp.load(tensors, storage_reader=reader, no_dist=world.size == 1))
    groups: Groups = {}
    for name, tensor in tensors.items():
        groups.setdefault(_group(name), {})[name] = tensor
    return groups


def _group(name: str) -> str:
    return "optimizer" if "|" in name else "rng" if name == "torch" else "model"


def _empty_like(entry: Any, layout: Tensor | None) -> Tensor:
    dtype = entry.properties.dtype
    if isinstance(layout, DTensor) and layout.shape == entry.size:
        return torch.empty_like(layout, dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


def _unwrapped(action: Any) -> None:
    """Run ``action``; the exception that failed a rank is raised on every rank, out of the wrapper torch puts it in."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process reads: as intended
            action()
    except CheckpointException as error:  # not an Exception
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"rank {rank}: {cause}") from cause
        raise RuntimeError(f"rank {rank}: {cause}") from cause
