"""Routing of tokens to experts and the rules that keep experts evenly loaded.

Router of DeepSeek-V3, Moonlight, Kimi K2, Kimi Linear and K3 (arXiv 2412.19437, section 2.1.2; 2507.20534)::

    s   = sigmoid(router logits)                      [T, E], fp32
    idx = top-k of (s + bias)                         the bias steers the choice and nothing else
    w   = s[idx] / sum(s[idx]) * scaling              unbiased scores

Balancing rules, all of them functions from statistics of one optimizer step to the next bias:

* sign update (arXiv 2408.15664; 2412.19437): a fixed step against each expert's overload;
* quantile balancing (Kimi K3 report, section 2.3.3, appendices C and D): the bias that gives every expert exactly its
  share of the tokens, given each token's cutoff; exact, or from a histogram whose counts add up over micro-batches
  and ranks.

Shapes: T tokens, E experts, k experts per token. Everything is fp32 (fp64 stays fp64) and mean-centred where it is a
bias: adding a constant to all biases changes no choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """indices [T, k] int64 in descending order of biased score, weights [T, k] (differentiable)."""

    indices: Tensor
    weights: Tensor


def choose_experts(scores: Tensor, bias: Tensor, top_k: int, *, groups: int = 1, top_groups: int = 1) -> Tensor:
    """Indices [T, k] of the chosen experts. With groups, only the ``top_groups`` groups with the largest sum of their
    two best biased scores are eligible (arXiv 2412.19437, section 2.1.2)."""
    biased = scores.detach() + bias
    if groups > 1:
        by_group = biased.unflatten(-1, (groups, -1))
        rank = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, rank.topk(top_groups, dim=-1).indices, True)
        biased = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return biased.topk(top_k, dim=-1).indices


def route(
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
) -> Routing:
    """Choose experts by biased score and weigh them by unbiased score."""
    indices = choose_experts(scores, bias, top_k, groups=groups, top_groups=top_groups)
    weights = scores.gather(-1, indices)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(indices, weights * scaling)


def expert_load(indices: Tensor, experts: int) -> Tensor:
    """Tokens per expert, int64 [E]."""
    return torch.bincount(indices.reshape(-1), minlength=experts)


def balanced_scaling(experts: int, top_k: int, samples: int = 20_000) -> float:
    """Routed scaling that keeps the routed branch at the scale of its experts: E[1 / |w|_2] over the renormalised top-k
    of sigmoid(N(0, 1)) scores (Moonlight, arXiv 2502.16982, appendix). 64 experts, top-6: 2.446; 384, top-8: 2.827."""
    generator = torch.Generator().manual_seed(0)
    total, done = 0.0, 0
    while done < samples:
        rows = min(samples - done, max(1, 2**22 // experts))
        top = torch.sigmoid(torch.randn(rows, experts, generator=generator)).topk(top_k, dim=-1).values.double()
        total += float((top.sum(-1) / top.norm(dim=-1)).sum())
        done += rows
    return total / samples


def sequence_balance_loss(scores: Tensor, indices: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
    """Sequence-wise balance loss (arXiv 2412.19437, equations 17-20), summed over tokens; 1 per token at balance.

    Every sequence of ``lengths`` contributes ``length * sum_e f_e P_e``: f_e = E / (k length) * its tokens on expert e,
    P_e = mean normalised score. Divide by the number of tokens for the mean.
    """
    experts, top_k = scores.shape[-1], indices.shape[-1]
    counts = torch.as_tensor(lengths, device=scores.device)
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=scores.device), counts)
    slots = sequence[:, None] * experts + indices
    load = torch.bincount(slots.reshape(-1), minlength=len(counts) * experts).view(-1, experts).to(scores.dtype)
    normalised = scores / scores.sum(-1, keepdim=True)
    mass = torch.zeros_like(load).index_add(0, sequence, normalised)
    per_token = (load * mass).sum(-1) / counts.clamp(min=1).to(scores.dtype)
    return per_token.sum() * (experts / top_k)


def sign_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """One sign update from the step's global token counts; mean-centred, so that biases do not drift together."""
    direction = torch.sign(load.to(bias.dtype).mean() - load.to(bias.dtype))
    return bias + rate * (direction - direction.mean())


def cutoffs(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """[T]: the (k+1)-th largest biased score of every token, what an expert must beat to be chosen."""
    _check_top_k(scores.shape[-1], top_k)
    return (scores.detach() + bias).topk(top_k + 1, dim=-1).values[:, -1]


def quantile_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Exact quantile balancing: the next bias [E] from ``scores`` [T, E] and the bias they were routed with.

    With the cutoffs held fixed, the result lets exactly T k / E tokens (rounded down) choose each expert, ties aside.
    Raises ValueError if top_k is not below the number of experts.
    """
    return bias_from_margins(scores.detach() - cutoffs(scores, bias, top_k)[:, None], top_k)


def bias_from_margins(margins: Tensor, top_k: int) -> Tensor:
    """``margins`` [T, E] = raw scores minus the token's cutoff, of all tokens of the step."""
    tokens, experts = margins.shape
    share = tokens * top_k // experts
    if tokens == 0:
        return margins.new_zeros(experts)
    edge = torch.kthvalue(margins, tokens - min(share, tokens - 1), dim=0).values  # the (share + 1)-th largest
    return edge.mean() - edge


def histogram_range(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Every required bias (cutoff minus score) lies within, for scores in [0, 1]; scalars on the bias's device."""
    low, high = torch.aminmax(bias)
    return low - 1.0, high + 1.0


def required_bias_histogram(scores: Tensor, bias: Tensor, top_k: int, bins: int) -> Tensor:
    """int64 [E, bins]: how many tokens need which bias to choose each expert. Counts of parts of a batch add up."""
    low, high = histogram_range(bias)
    required = cutoffs(scores, bias, top_k)[:, None] - scores.detach()
    experts = scores.shape[-1]
    place = ((required - low) * (bins / (high - low))).long().clamp_(0, bins - 1)
    place += torch.arange(experts, device=scores.device) * bins
    return torch.bincount(place.reshape(-1), minlength=experts * bins).view(experts, bins)


def quantiles_from_histogram(histogram: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """[E] fp64: the required bias at rank ceil(T k / E) of every expert, each within one bin of its exact value.

    ``bias`` is the one the histogram's range was made from; a bin is (max(bias) - min(bias) + 2) / bins wide.
    """
    low, high = histogram_range(bias)
    target = int(histogram[0].sum()) * top_k / len(histogram)
    cumulative = histogram.cumsum(-1)
    place = torch.searchsorted(cumulative, torch.full_like(cumulative[:, :1], max(math.ceil(target), 1)))
    inside = histogram.gather(-1, place).double()
    before = cumulative.gather(-1, place).double() - inside
    within = ((target - before) / inside).clamp(0, 1)
    return (low + (place + within) * ((high - low) / histogram.shape[1])).squeeze(-1)


def bias_from_histogram(histogram: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The next bias from the step's summed histogram; unchanged if it counted no token."""
    if not histogram.any():
        return bias.clone()
    value = quantiles_from_histogram(histogram, bias, top_k)
    return (value - value.mean()).to(bias.dtype)


def _check_top_k(experts: int, top_k: int) -> None:
    if not 0 < top_k < experts:
        raise ValueError(f"top_k: {top_k} must be between 1 and {experts - 1} to balance {experts} experts")
