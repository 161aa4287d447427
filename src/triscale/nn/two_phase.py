"""Two-phase inference of block Attention Residuals (arXiv 2603.15031, section 4).

Phase one, when a block is sealed: one pass over the sealed blocks for all sublayers that will read them. Phase two, at
each of those sublayers: merge the open block's sum with an online softmax, which is exact::

    a = sigmoid(score(partial) - log sum exp(sealed scores)) ;   h = (1 - a) mixed + a partial

:class:`Ahead` is this for any number of tokens. Decoding one token on a CPU is bound by the number of calls and not by
arithmetic, so :class:`AheadOfOne` does the same with Python numbers wherever a tensor would hold a single element.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triscale.ops.depth_attention import inverse_rms_of

# Elements of the phase-one result above which inference takes the plain form instead (256 MB of fp32).
LIMIT = 1 << 26


class Folded(NamedTuple):
    """Query * norm weight of the coming sublayers: [Q, D], and the same as Q vectors; a vector of zeros."""

    matrix: Tensor
    rows: tuple[Tensor, ...]
    zeros: Tensor


class FoldCache:
    """The folded queries of some sublayers, kept until one of their parameters changes, moves or is replaced.

    Checked for every block and token, hence through the modules' own dictionaries (attribute access on modules is
    slow). No other tensor can take over an address that was seen: ``_kept`` holds the memory.
    """

    def __init__(self, readers: Sequence[nn.Module]):
        self._parts = [(reader._modules, name) for name in ("proj", "norm") for reader in readers]
        self._seen: list[tuple[int, int]] | None = None
        self._kept: list[Tensor] = []
        self._folded: Folded | None = None

    def __len__(self) -> int:
        return len(self._parts) // 2

    def get(self, dtype: torch.dtype) -> Folded | None:
        """In the working dtype of blocks of ``dtype``; None if the parameters are sharded (not at hand)."""
        weights: Any = [parts[name]._parameters["weight"] for parts, name in self._parts]  # type: ignore[union-attr]
        try:
            seen = [(weight.data_ptr(), weight._version) for weight in weights]
        except RuntimeError:  # inference tensors count no versions, DTensors have no address
            seen = None
        work = torch.float64 if dtype == torch.float64 else torch.float32
        if seen is None or seen != self._seen or self._folded is None or self._folded.matrix.dtype != work:
            self._folded, self._seen = self._fold(weights, work), seen
        return self._folded

    def _fold(self, weights: list[Tensor], work: torch.dtype) -> Folded | None:
        if hasattr(weights[0], "device_mesh"):
            return None
        self._kept = kept = [weight.detach() for weight in weights]
        matrix = torch.cat(kept[: len(self)]).to(work) * torch.stack(kept[len(self) :]).to(work)
        return Folded(matrix, matrix.unbind(0), torch.zeros_like(matrix[0]))


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
        if norm is not None:  # one call for h * weight * inverse RMS
            h = torch.addcmul(self.folded.zeros, h, norm[0], value=_inverse_rms(h, norm[1]))
        return h.view(partial.shape) if h.dtype == partial.dtype else h.to(partial.dtype).view(partial.shape)


def look_ahead(
    first: int, blocks: Sequence[Tensor], folded: Folded, eps: float, before: Ahead | AheadOfOne | None
) -> Ahead | AheadOfOne:
    """Phase one; ``before`` is the previous block's, if there was one. Computed in the dtype of ``folded``."""
    width, work = folded.matrix.shape[1], folded.matrix.dtype
    values = torch.cat(tuple(blocks))
    if values.dtype != work:
        values = values.to(work)
    tokens = values.numel() // (width * len(blocks))
    if tokens == 1 and values.is_cpu:
        values = values.view(len(blocks), width)
        known = before.inverse if isinstance(before, AheadOfOne) else ()
        missing = [_inverse_rms(value, eps) for value in values[len(known) :].unbind(0)]
        return _look_ahead_of_one(first, values, folded, (*known, *missing))
    values = values.view(len(blocks), tokens, width)
    inverse = inverse_rms_of(values, eps).view(len(blocks), tokens, 1)
    scores = (values @ folded.matrix.mT).mul_(inverse)  # [n, tokens, Q]
    log_sum = torch.logsumexp(scores, dim=0)
    weights = scores.sub_(log_sum).exp_()
    mixed = torch.bmm(weights.permute(1, 2, 0), values.transpose(0, 1))  # [tokens, Q, D]
    return Ahead(first, folded, mixed.unbind(1), log_sum.unbind(1))


def _look_ahead_of_one(first: int, values: Tensor, folded: Folded, inverse: tuple[float, ...]) -> AheadOfOne:
    """values [n, D]. The softmax over a handful of sources is cheaper in Python than its kernels are to call."""
    if len(inverse) == 1:  # the embedding alone: its weight is 1
        products = torch.mv(folded.matrix, values[0]).tolist()
        return AheadOfOne(first, folded, (values[0],) * len(products), [p * inverse[0] for p in products], inverse)
    weights = array("d" if values.dtype == torch.float64 else "f")
    log_sum = []
    for products in torch.mm(folded.matrix, values.mT).tolist():  # [Q, n]
        scores = [product * scale for product, scale in zip(products, inverse, strict=True)]
        best = max(scores)
        exponentials = [math.exp(score - best) for score in scores]
        total = sum(exponentials)
        weights.extend([value / total for value in exponentials])
        log_sum.append(best + math.log(total))
    mixing = torch.frombuffer(weights, dtype=values.dtype).view(len(log_sum), len(inverse))
    return AheadOfOne(first, folded, torch.mm(mixing, values).unbind(0), log_sum, inverse)


def _inverse_rms(value: Tensor, eps: float) -> float:
    return 1 / math.sqrt(torch.dot(value, value).item() / value.shape[0] + eps)


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))
