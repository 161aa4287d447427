"""Two-phase inference of block Attention Residuals (arXiv 2603.15031, section 4).

Phase one, when a block is sealed: one pass over the sealed blocks for all sublayers that will read them. Phase two, at
each of those sublayers: merge the open block's sum with an online softmax, which is exact::

    a = sigmoid(score(partial) - log sum exp(sealed scores)) ;   h = (1 - a) mixed + a partial
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


class Ahead(NamedTuple):
    """The sealed blocks as seen by the coming sublayers, one entry each."""

    first: int  # sublayer index of entry 0
    folded: tuple[Tensor, ...]  # [D] query * norm weight
    mixed: tuple[Tensor, ...]  # [tokens, D] mixture of the sealed blocks
    log_sum: Sequence[Tensor | float]  # [tokens] log of the sum of exponentiated scores; a number for one token


def look_ahead(first: int, blocks: Sequence[Tensor], folded: Tensor, eps: float) -> Ahead:
    """Phase one for the queries ``folded`` [Q, D], in their dtype."""
    width = folded.shape[1]
    values = torch.stack(tuple(blocks)).view(len(blocks), -1, width).to(folded.dtype)
    inverse = inverse_rms_of(values, eps).view(values.shape[:2])
    scores = (values @ folded.mT).mul_(inverse[..., None])  # [n, tokens, Q]
    log_sum = torch.logsumexp(scores, dim=0)
    weights = scores.sub_(log_sum).exp_()
    mixed = torch.bmm(weights.permute(1, 2, 0), values.transpose(0, 1))  # [tokens, Q, D]
    single = _single_token_on_cpu(values[0])
    sums: Sequence[Tensor | float] = log_sum[0].tolist() if single else log_sum.unbind(1)
    return Ahead(first, folded.unbind(0), mixed.unbind(1), sums)


def merge(ahead: Ahead, row: int, partial: Tensor, eps: float) -> Tensor:
    """Phase two for entry ``row``; partial [..., D] -> h of the same shape and dtype."""
    mixed, folded, log_sum = ahead.mixed[row], ahead.folded[row], ahead.log_sum[row]
    value = partial.reshape(mixed.shape).to(mixed.dtype)
    if isinstance(log_sum, float):  # one token: plain numbers are cheaper than tensors of one element
        one = value[0]
        scale = 1 / math.sqrt(torch.dot(one, one).item() / one.shape[0] + eps)
        weight = _sigmoid(torch.dot(one, folded).item() * scale - log_sum)
        return torch.lerp(mixed, value, weight).to(partial.dtype).view(partial.shape)
    score = (value @ folded) * inverse_rms_of(value, eps)
    return torch.lerp(mixed, value, torch.sigmoid(score - log_sum)[:, None]).to(partial.dtype).view(partial.shape)


def normalize(h: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the merged value; for one token on a CPU in far fewer calls than the general form."""
    if not _single_token_on_cpu(h.reshape(-1, h.shape[-1])) or h.dtype not in (torch.float32, torch.float64):
        wide = torch.promote_types(h.dtype, torch.float32)
        return F.rms_norm(h.to(wide), h.shape[-1:], weight.to(wide), eps).to(h.dtype)
    one = h.view(-1)
    return (h * weight).mul_(1 / math.sqrt(torch.dot(one, one).item() / one.shape[0] + eps))


def _single_token_on_cpu(values: Tensor) -> bool:
    return values.shape[0] == 1 and values.device.type == "cpu"


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))
