"""Expert parallelism: every rank holds a share of the experts and tokens travel to them by all-to-all.

The expert stacks become DTensors sharded along the expert dimension of a one-dimensional device mesh, so checkpoints,
gradient norms and optimizers see one global parameter. Routing, shared experts and everything else stay as they are on
every rank. N ranks compute what one rank computes on the joined batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from triscale.ops.gated_activation import GatedActivation
from triscale.ops.grouped_experts import combine, grouped_experts, sort_by_expert


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Shard every mixture of experts of ``model`` over ``mesh`` (1-D); returns the sharded stacks.

    Raises ValueError if the ranks do not divide the experts. Sharded stacks must be left out of other sharding
    (``fully_shard(..., ignored_params=...)``): their gradients are complete, being sums over all ranks' tokens.
    """
    from .mixture_of_experts import RoutedExperts

    found = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    stacks = []
    for module in found:
        if module.count % mesh.size():
            raise ValueError(f"experts: {module.count} cannot be split over {mesh.size()} ranks")
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(module, name)
            sharded = distribute_tensor(whole.data, mesh, [Shard(0)])
            stacks.append(nn.Parameter(sharded, requires_grad=whole.requires_grad))
            setattr(module, name, stacks[-1])
    return stacks


def exchange_and_compute(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: Any, down: Any, activation: GatedActivation
) -> Tensor:
    """x [T, D] of this rank -> [T, D], the stacks being DTensors: send each routed row to its expert's rank, compute there, send it back."""
    group, ranks = gate_up.device_mesh.get_group(), gate_up.device_mesh.size()
    local = gate_up.shape[0] // ranks
    rows = sort_by_expert(indices, gate_up.shape[0])  # expert order is rank order
    here = rows.counts.view(ranks, local)
    there = torch.empty_like(here)  # [source rank, local expert]
    dist.all_to_all_single(there, here, group=group)
    sent, received = here.sum(1).tolist(), there.sum(1).tolist()
    arrived = _AllToAll.apply(x[rows.token], received, sent, group)
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(there.reshape(-1))
    ones = torch.ones(len(expert), 1, dtype=torch.float32, device=x.device)
    done = grouped_experts(arrived, expert[:, None], ones, gate_up.to_local(), down.to_local(), activation)
    back = _AllToAll.apply(done, sent, received, group)
    return combine(back, rows.place, weights)


class _AllToAll(torch.autograd.Function):
    """Rows to ranks by ``sends``, from ranks by ``receives``; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        return _exchange(x, receives, sends, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.sends, ctx.receives, ctx.group), None, None, None


def _exchange(x: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
    out = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)
    return out
