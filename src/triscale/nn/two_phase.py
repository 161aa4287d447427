"""Two-phase inference of block Attention Residuals (arXiv 2603.15031, section 4).

Phase one, when a block is sealed: one pass over the sealed blocks for all sublayers that will read them. Phase two, at
each of those sublayers: merge the open block's sum with an online softmax, which is exact::

    a = sigmoid(score(partial) - log sum exp(sealed scores)) ;   h = (1 - a) mixed + a partial

:class:`Ahead` is this for any number of tokens. Decoding one token on a CPU is bound by the number of calls and not by
arithmetic, so :class:`AheadOfOne` does the same with Python numbers wherever a tensor would hold a single element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from triscale.ops.depth_attention import inverse_rms_of

# Elements of the phase-one result above which inference takes the plain form instead (256 MB of fp32).
LIMIT = 1 << 26


class Folded(NamedTuple):
    """Query * norm weight of the coming sublayers: [Q, D], and the same as Q vectors."""

    matrix: Tensor
    rows: tuple[Tensor, ...]


class Ahead(NamedTuple):
    """The sealed blocks as seen by the coming sublayers, one entry each."""

    first: int  # sublayer index of entry 0
    folded: Folded
    mixed: tuple[Tensor, ...]  # [tokens, D] mixture of the sealed blocks
    log_sum: tuple[Tensor, ...]  # [tokens] log of the sum of exponentiated scores

    @property
    def last(self) -> int:
        return self.first + len(self.mixed) - 1

    def read(self, index: int, partial: Tensor, eps: float, norm: tuple[Tensor, float] | None) -> Tensor:
        """Phase two for sublayer ``index``; partial [..., D] -> h, RMS-normalised with (weight, eps) if given."""
        row = index - self.first
        mixed = self.mixed[row]
        value = partial.reshape(mixed.shape).to(mixed.dtype)
        with torch.autocast(value.device.type, enabled=False):
            score = (value @ self.folded.rows[row]) * inverse_rms_of(value, eps)
        h = torch.lerp(mixed, value, torch.sigmoid(score - self.log_sum[row])[:, None])
        if norm is not None:
            h = F.rms_norm(h, h.shape[-1:], norm[0].to(h.dtype), norm[1])
        return h.to(partial.dtype).view(partial.shape)


class AheadOfOne(NamedTuple):
    """:class:`Ahead` for one token, its numbers in Python."""

    first: int
    folded: Folded
    mixed: tuple[Tensor, ...]  # [D]
    log_sum: list[float]
    inverse: tuple[float, ...]  # inverse RMS of the sealed blocks, for the next phase one

    @property
    def last(self) -> int:
        return self.first + len(self.mixed) - 1

    def read(self, index: int, partial: Tensor, eps: float, norm: tuple[Tensor, float] | None) -> Tensor:
        row = index - self.first
        mixed, value = self.mixed[row], partial.view(-1)
        if partial.dtype != mixed.dtype:
            value = value.to(mixed.dtype)
        score = torch.dot(value, self.folded.rows[row]).item() * _inverse_rms(value, eps)
        h = torch.lerp(mixed, value, _sigmoid(score - self.log_sum[row]))
        if norm is not None:
            h = (h * norm[0]).mul_(_inverse_rms(h, norm[1]))
        return h.view(partial.shape) if h.dtype == partial.dtype else h.to(partial.dtype).view(partial.shape)


def look_ahead(
    first: int, blocks: Sequence[Tensor], folded: Folded, eps: float, before: Ahead | AheadOfOne | None
) -> Ahead | AheadOfOne:
    """Phase one; ``before`` is the previous block's, if there was one. Computed in the dtype of ``folded``."""
    width, work = folded.matrix.shape[1], folded.matrix.dtype
    values = torch.cat(tuple(blocks)).to(work)
    tokens = blocks[0].numel() // width
    if tokens == 1 and values.device.type == "cpu":
        known = before.inverse if isinstance(before, AheadOfOne) else ()
        missing = (_inverse_rms(block.view(-1).to(work), eps) for block in blocks[len(known) :])
        return _look_ahead_of_one(first, values.view(len(blocks), width), folded, (*known, *missing))
    values = values.view(len(blocks), tokens, width)
    inverse = inverse_rms_of(values, eps).view(len(blocks), tokens, 1)
    scores = (values @ folded.matrix.mT).mul_(inverse)  # [n, tokens, Q]
    log_sum = torch.logsumexp(scores, dim=0)
    weights = scores.sub_(log_sum).exp_()
    mixed = torch.bmm(weights.permute(1, 2, 0), values.transpose(0, 1))  # [tokens, Q, D]
    return Ahead(first, folded, mixed.unbind(1), log_sum.unbind(1))


def _look_ahead_of_one(first: int, values: Tensor, folded: Folded, inverse: tuple[float, ...]) -> AheadOfOne:
    """values [n, D]."""
    scores = (folded.matrix @ values.mT).mul_(torch.tensor(inverse, dtype=values.dtype))  # [Q, n]
    weights = torch.softmax(scores, dim=1)
    log_sum = []
    for row, weight in zip(scores.tolist(), weights.tolist(), strict=True):
        best = max(range(len(row)), key=row.__getitem__)
        log_sum.append(row[best] - math.log(weight[best]))
    return AheadOfOne(first, folded, (weights @ values).unbind(0), log_sum, inverse)


def _inverse_rms(value: Tensor, eps: float) -> float:
    return 1 / math.sqrt(torch.dot(value, value).item() / value.shape[0] + eps)


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))
