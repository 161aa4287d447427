"""Auxiliary losses that join the gradient where they arise, with nothing to pass up to the training loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch import TokenBatch


def add_auxiliary_loss(x: Tensor, loss: Tensor, batch: TokenBatch) -> Tensor:
    """Return ``x`` unchanged; in backward ``loss`` joins the objective.

    ``loss`` is a sum over the batch's tokens, like the training loss, and gets the factor by which the trainer
    multiplies that sum before backward: ``batch.memo["loss_scale"]`` (1 if it is not set).
    """
    return _AddLoss.apply(x, loss, float(batch.memo.get("loss_scale", 1.0)))


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return gradient, torch.full((), ctx.scale, dtype=dtype, device=device), None
