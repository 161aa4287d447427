"""How the router's bias follows the load of the experts: the ``balance`` part of a mixture of experts.

A rule sees every training micro-batch once (:meth:`observe`) and moves the bias once per optimizer step
(:meth:`next_bias`), from statistics of the whole step over all ranks. What it gathers lives in buffers that are cleared
by the step, so that nothing but the bias outlives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from triscale.ops.routing import (
    bias_from_histogram,
    bias_from_margins,
    cutoffs,
    required_bias_histogram,
    sign_bias,
)


class NoBalance(nn.Module):
    """The bias stays as it is."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        def build(self, experts: int, top_k: int) -> NoBalance:
            return NoBalance()

    def observe(self, scores: Tensor, bias: Tensor) -> None:
        """scores [T, E] of one training micro-batch, routed with ``bias`` [E]."""

    def next_bias(self, bias: Tensor, load: Tensor, group: Any = None) -> Tensor:
        """The next bias; load [E]: the step's tokens per expert, already summed over ranks."""
        return bias


class SignBalance(NoBalance):
    """A fixed step against each expert's overload, mean-centred (DeepSeek-V3; Moonlight)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        rate: float = 1e-3

        def __post_init__(self) -> None:
            if self.rate < 0:
                raise ValueError(f"rate: {self.rate} must not be negative")

        def build(self, experts: int, top_k: int) -> SignBalance:
            return SignBalance(self.rate)

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def next_bias(self, bias: Tensor, load: Tensor, group: Any = None) -> Tensor:
        return sign_bias(bias, load, self.rate)


class QuantileBalance(NoBalance):
    """Quantile balancing (Kimi K3 report, section 2.3.3): no rate, settles in a few steps.

    estimator "histogram" keeps [E, bins] counts and makes one integer all-reduce per step; its error is at most one
    bin. "exact" keeps every margin of the step and gathers them: for tests and small models.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        estimator: Literal["histogram", "exact"] = "histogram"
        bins: int = 1000

        def __post_init__(self) -> None:
            if self.bins < 2:
                raise ValueError(f"bins: {self.bins} must be at least 2")

        def build(self, experts: int, top_k: int) -> QuantileBalance:
            if top_k >= experts:
                raise ValueError(f"top_k: {top_k} of {experts} experts leaves nothing to balance; use balance = 'none'")
            return QuantileBalance(self, experts, top_k)

    histogram: Tensor

    def __init__(self, config: Config, experts: int, top_k: int):
        super().__init__()
        self.exact, self.bins, self.top_k, self.experts = config.estimator == "exact", config.bins, top_k, experts
        self.margins: list[Tensor] = []
        if not self.exact:
            self.register_buffer("histogram", torch.zeros(experts, config.bins, dtype=torch.int64), persistent=False)

    def observe(self, scores: Tensor, bias: Tensor) -> None:
        if self.exact:
            self.margins.append(scores.detach() - cutoffs(scores, bias, self.top_k)[:, None])
        else:
            self.histogram += required_bias_histogram(scores, bias, self.top_k, self.bins)

    def next_bias(self, bias: Tensor, load: Tensor, group: Any = None) -> Tensor:
        if self.exact:
            return self._exact(bias, group)
        if group is not None:
            dist.all_reduce(self.histogram, group=group)
        result = bias_from_histogram(self.histogram, bias, self.top_k)
        self.histogram.zero_()
        return result

    def _exact(self, bias: Tensor, group: Any) -> Tensor:
        margins = torch.cat(self.margins) if self.margins else bias.new_zeros(0, self.experts)
        self.margins.clear()
        if group is not None:
            everyone: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, margins.cpu(), group=group)
            margins = torch.cat(everyone).to(bias.device)
        return bias_from_margins(margins, self.top_k) if len(margins) else bias
