"""Constant 0/1 matrices that turn log decays into sums, and masks. Products with them are exact running sums: every
exponent is a sum of decays of one sign, never a difference of two long sums that cancel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def centred(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size, size]: row i sums g over (a, i] if i > a and -g over (i, a] if i < a, with the anchor a = size/2 - 1."""
    anchor = size // 2 - 1
    i, t = torch.arange(size)[:, None], torch.arange(size)[None, :]
    after, before = (t > anchor) & (t <= i), (t > i) & (t <= anchor)
    return (after.to(dtype) - before.to(dtype)).to(device)


@lru_cache(maxsize=64)
def prefix_and_suffix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[2 * size, size]: sums over [0, i], then sums over (i, size)."""
    i, t = torch.arange(size)[:, None], torch.arange(size)[None, :]
    return torch.cat([t <= i, t > i]).to(dtype).to(device)


@lru_cache(maxsize=64)
def halving(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums and masks of the levels half = size/2, ..., 1 of a binary split.

    At one level a tile consists of pairs of halves. Row i of the sums covers (start of its half, i] with the start
    included if i lies in a second half, and (i, end of its half] if it lies in a first one. The mask marks the
    pairs (i in the second half, j in the first half of the same pair). Over all levels every i > j is marked once.
    Returns sums [levels, size, size] and masks [levels, size, size].
    """
    i, t = torch.arange(size)[:, None], torch.arange(size)[None, :]
    sums, masks = [], []
    half = size // 2
    while half:
        same_half, same_pair = i // half == t // half, i // (2 * half) == t // (2 * half)
        second = (i // half) % 2 == 1
        sums.append(same_half & torch.where(second, t <= i, t > i))
        masks.append(same_pair & second & ~same_half)
        half //= 2
    return torch.stack(sums).to(dtype).to(device), torch.stack(masks).to(dtype).to(device)
