"""Vectors of length one: x / sqrt(sum x^2 + eps) over the last axis, with a backward pass of four sweeps."""

from __future__ import annotations

import torch
from torch import Tensor


def to_unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x [..., D] -> the same shape in at least fp32. ``eps`` is added to the sum of squares, as in Kimi Linear."""
    return _UnitLength.apply(x, eps)


class _UnitLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
        y = wide * inverse
        ctx.save_for_backward(y, inverse)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        y, inverse = ctx.saved_tensors
        along = (y * dy).sum(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1).mul_(inverse).to(ctx.dtype), None
