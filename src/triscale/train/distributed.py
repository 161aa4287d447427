"""Training on several processes: ``torchrun --nproc-per-node N -m triscale train``.

Parameters, gradients and optimizer state are sharded with FSDP2 (``fully_shard``), layer by layer. Each rank takes an
equal share of the step's rows; losses and gradients are those of the whole batch, so N ranks train what one rank
trains. Each rank writes and reads its own part of a checkpoint (see :mod:`.sharded`), and a run saved by N ranks resumes
on any number. All ranks must see the run folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from triscale.config import ConfigError, TriScaleError

# What one rank does while the others wait (preparing a corpus) may take long; a rank that died is torchrun's to notice.
PATIENCE = timedelta(hours=12)


class PeerError(TriScaleError):
    """Another rank failed and has told the user why; this one ends in silence."""

    told = True


class World:
    """This process among its peers. One process needs none of it: every method is then a plain pass-through."""

    def __init__(self, size: int | None = None) -> None:
        """size: None = as torchrun says."""
        self.size = size or int(os.environ.get("WORLD_SIZE", "1"))
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
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
            self._ours = True
        self.mesh = init_device_mesh(device.type, (self.size,))
        return device

    def leave(self) -> None:
        if self._ours and dist.is_initialized():
            dist.destroy_process_group()
            self._ours = False

    def gather(self, value: Any) -> list[Any]:
        """``value`` (small, picklable) of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first rank runs the body before the others: for what one process creates and the rest find.

        If the body fails there, the others raise :class:`PeerError` instead of running it.
        """
        problem = None
        if not self.first:
            problem = self.gather(None)[0]
            if problem is not None:
                raise PeerError(problem)
            yield
            return
        try:
            yield
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.gather(problem)

    def shard(self, model: Any, expert_parallel: bool = False) -> None:
        """Shard a decoder in place, one unit a layer; with ``expert_parallel`` every rank keeps whole experts instead of
        a part of each, and tokens travel to them."""
        if self.size == 1:
            return
        from torch.distributed.fsdp import fully_shard

        experts = self._spread_experts(model) if expert_parallel else set()
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh, ignored_params=experts)
        fully_shard(model, mesh=self.mesh, ignored_params=experts)

    def _spread_experts(self, model: Any) -> set[nn.Parameter]:
        from triscale.nn.expert_parallel import shard_experts

        try:
            stacks = shard_experts(model, self.mesh)
        except ValueError as error:
            raise ConfigError("runtime.expert_parallel", str(error), "Use a number of processes that divides the experts "
                              "of every layer, or leave it off")  from error  # fmt: skip
        for stack in stacks:  # their gradients are sums over all ranks' tokens; those of the rest become averages
            stack.register_hook(lambda gradient: gradient / self.size)
        return set(stacks)

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


ALONE = World(1)
