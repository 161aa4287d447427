"""Rotary position embedding (Su et al. 2021), half-split layout."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 1, dim/2] in fp32 for integer ``positions`` [N]; broadcast over heads."""
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angles = positions.float()[:, None] * theta**-exponents
    return angles.cos()[:, None], angles.sin()[:, None]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + dim/2) of x [..., N, H, dim]; computed in fp32 for narrower dtypes."""
    cos, sin = cos.to(torch.promote_types(x.dtype, cos.dtype)), sin.to(torch.promote_types(x.dtype, sin.dtype))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
