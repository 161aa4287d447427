"""YaRN context extension of rotary embeddings (Peng et al. 2023, arXiv 2309.00071, section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """factor: context extension over ``original_context`` positions. beta_fast, beta_slow: rotations within the
    original context above which a frequency is kept, and below which it is divided by ``factor``. mscale /
    mscale_all_dim scales cos and sin; mscale_all_dim alone scales the softmax (squared), as in DeepSeek-V3 and K2."""

    factor: float
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_context < 1:
            raise ValueError(f"yarn: factor {self.factor} and original_context {self.original_context} must be >= 1")

    @property
    def softmax_factor(self) -> float:
        """Multiplies the softmax scale."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @property
    def rotation_factor(self) -> float:
        """Multiplies cos and sin."""
        return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)


def rotary_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """Radians per position of each of the dim/2 pairs, fp32."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float32)
    plain = 1.0 / theta ** (pairs / dim)
    if yarn is None:
        return plain
    low = math.floor(_pair_with_rotations(yarn.beta_fast, dim, theta, yarn.original_context))
    high = math.ceil(_pair_with_rotations(yarn.beta_slow, dim, theta, yarn.original_context))
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0, 1)
    return plain / yarn.factor * slowed + plain * (1 - slowed)


def _pair_with_rotations(rotations: float, dim: int, theta: float, context: int) -> float:
    """The (fractional) pair index that turns ``rotations`` times within ``context`` positions."""
    return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
