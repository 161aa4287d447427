"""Training on several processes: ``torchrun --nproc-per-node N -m triscale train``.

Parameters, gradients and optimizer state are sharded with FSDP2 (``fully_shard``), layer by layer. Each rank takes an
equal share of the step's rows; losses and gradients are those of the whole batch, so N ranks train what one rank
trains. Checkpoints hold whole tensors in the format of a single process: a run saved by N ranks resumes on any number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from triscale.config import ConfigError


class World:
    """This process among its peers. One process needs none of it: every method is then a plain pass-through."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        self.mesh: Any = None
        self._ours = False

    @property
    def first(self) -> bool:
        """Whether this rank writes the run's files and talks to the user."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.size > 1 else None

    def join(self, device: torch.device) -> torch.device:
        """Start the process group (gloo on CPU, NCCL on GPUs) and return this rank's device."""
        if self.size == 1:
            return device
        from torch.distributed.device_mesh import init_device_mesh

        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            self._ours = True
        self.mesh = init_device_mesh(device.type, (self.size,))
        return device

    def leave(self) -> None:
        if self._ours and dist.is_initialized():
            dist.destroy_process_group()
            self._ours = False

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first rank runs the body before the others: for what one process creates and the rest find."""
        if self.size > 1 and not self.first:
            dist.barrier()
        yield
        if self.size > 1 and self.first:
            dist.barrier()

    def shard(self, model: Any) -> None:
        """Shard a decoder in place, one unit a layer."""
        if self.size == 1:
            return
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)

    def share(self, rows: int) -> tuple[int, int]:
        """This rank's part (first, last) of a step's rows; raises :class:`ConfigError` if they do not divide."""
        if rows % self.size:
            raise ConfigError("train.batch_tokens", f"{rows} rows do not divide among {self.size} processes",
                              f"Use a multiple of row_length * {self.size}")  # fmt: skip
        part = rows // self.size
        return self.rank * part, (self.rank + 1) * part

    def total(self, value: float, device: torch.device) -> float:
        """The sum of ``value`` over ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        dist.all_reduce(tensor)
        return float(tensor)

    def agree(self, flag: bool, device: torch.device) -> bool:
        """Whether any rank says so: all ranks stop at the same step."""
        return self.total(float(flag), device) > 0


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one (every rank must call), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(target: Tensor, value: Tensor) -> Tensor:
    """``value``, whole on every rank, laid out like ``target``; no communication."""
    if not isinstance(target, DTensor):
        return value
    value = value.to(target.device)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def load_whole(model: nn.Module, tensors: dict[str, Tensor], strict: bool = True) -> None:
    """Load whole tensors into a model that may be sharded."""
    current = model.state_dict()
    laid_out = {name: like(current[name], value) if name in current else value for name, value in tensors.items()}
    model.load_state_dict(laid_out, strict=strict)
