"""The router of a mixture of experts: fp32 sigmoid scores, a correction bias, and the counting that moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from triscale.config import Role
from triscale.ops.routing import Routing, expert_load, route, sequence_balance_loss

from .auxiliary_loss import add_auxiliary_loss
from .batch import TokenBatch
from .context import BuildContext

if TYPE_CHECKING:
    from .mixture_of_experts import MixtureOfExperts


class Router(nn.Module):
    """[T, width] -> experts and weights per token.

    ``e_score_correction_bias`` [E] is an fp32 buffer that no gradient reaches and that stays fp32 through ``.to(...)``
    and in every checkpoint: rounding it to bf16 changes which experts are chosen. It moves in
    :meth:`after_optimizer_step`, once per step, by the ``balance`` part. Tokens are counted in training forwards only:
    not in eval mode, not without gradients, and not again when activation checkpointing recomputes a layer.
    """

    e_score_correction_bias: Tensor
    load: Tensor
    last_load: Tensor

    def __init__(self, config: MixtureOfExperts.Config, context: BuildContext):
        super().__init__()
        self.config, self.scaling = config, config.scaling()
        self.weight = nn.Parameter(torch.empty(config.experts, context.width, **context.factory))
        nn.init.normal_(self.weight, std=0.02)
        with torch.device(
            context.device or torch.get_default_device()
        ):  # a large model's counters on meta take nothing
            self.balance = config.balance.build(config.experts, config.top_k)
        zeros = lambda kind: torch.zeros(config.experts, dtype=kind, device=context.device)
        self.register_buffer("e_score_correction_bias", zeros(torch.float32))
        self.register_buffer("load", zeros(torch.int64), persistent=False)  # this step so far
        self.register_buffer("last_load", zeros(torch.int64), persistent=False)  # the step before, all ranks

    def forward(self, x: Tensor, batch: TokenBatch) -> Routing:
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            scores = torch.sigmoid(x.to(wide) @ self.weight.to(wide).mT)
            bias, config = self.e_score_correction_bias, self.config
            routing = route(
                scores,
                bias,
                config.top_k,
                groups=config.groups,
                top_groups=config.top_groups,
                renormalize=config.renormalize,
                scaling=self.scaling,
            )
        if self.training and torch.is_grad_enabled():
            if not inside_backward():
                with torch.no_grad():
                    self.load += expert_load(routing.indices, config.experts)
                    self.balance.observe(scores, bias)
            if config.sequence_loss:
                loss = sequence_balance_loss(scores, routing.indices, batch.lengths)
                weights = add_auxiliary_loss(routing.weights, config.sequence_loss * loss, batch)
                routing = Routing(routing.indices, weights)
        return routing

    @torch.no_grad()
    def after_optimizer_step(self, process_group: Any = None) -> None:
        """Move the bias by the step's counts, summed over ``process_group`` (data and expert parallel ranks)."""
        if process_group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            process_group = dist.group.WORLD
        if process_group is not None:
            dist.all_reduce(self.load, group=process_group)
        if self.load.any():
            bias = self.e_score_correction_bias
            bias.copy_(self.balance.next_bias(bias, self.load, process_group))
        self.last_load.copy_(self.load)
        self.load.zero_()

    def statistics(self) -> dict[str, float]:
        """Balance of the last step: the fullest and emptiest expert against the mean, and the spread of the bias."""
        load, bias = self.last_load.double(), self.e_score_correction_bias
        mean = max(float(load.mean()), 1e-9)
        return {
            "max_load": float(load.max()) / mean,
            "min_load": float(load.min()) / mean,
            "bias_range": float(bias.max() - bias.min()),
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Follow device moves, but never a change of the bias's dtype."""
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if moved.dtype != torch.float32:
            self.e_score_correction_bias = bias.to(moved.device)
        return self

    def parameter_roles(self) -> dict[str, Role]:
        return {"weight": Role(kind="router")}


def inside_backward() -> bool:
    """Whether autograd is running: a forward inside a backward is a recomputation, not new tokens."""
    return torch._C._current_graph_task_id() != -1
