"""Attention over depth (Attention Residuals, arXiv 2603.15031, section 3; Kimi K3 report, equations 8-10).

A sublayer no longer adds to one residual stream. It reads a softmax-weighted mean of earlier outputs::

    score_i = query . (norm_weight * v_i * rsqrt(mean(v_i ** 2) + eps))        # one number per token and source
    h       = sum_i softmax_i(score)_i v_i                                     # the values are not normalised

Shapes: n sources of [..., D], ``query`` and ``norm_weight`` [D]. There is no 1/sqrt(D), and a zero query gives the
plain mean of the sources. Scores, softmax and the sum are computed in fp32 (fp64 inputs stay fp64) and cast once.

:func:`mix_over_depth_reference` is the definition. :func:`mix_over_depth` is the operator to use: its backward is
written by hand and keeps two numbers per token and source beside references to the sources themselves, where
autograd would keep several fp32 copies of every source. With ``output_norm`` it also applies the pre-norm that follows,
and recomputes the mixed value in backward, so that a sublayer keeps one activation exactly as a plain residual does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def mix_over_depth_reference(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The definition, one line per equation. Keeps the dtype of the first source."""
    work = _work_dtype(sources[0])
    values = torch.stack([source.to(work) for source in sources])
    keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * norm_weight.to(work)
    weights = torch.softmax((keys * query.to(work).reshape(-1)).sum(-1, keepdim=True), dim=0)
    return (weights * values).sum(0).to(sources[0].dtype)


def mix_over_depth(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
    *,
    inverse_rms: Sequence[Tensor] | None = None,
    output_norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Mix ``sources`` by attention over depth.

    sources: n >= 1 tensors of one shape [..., D], or one tensor [n, ..., D]. query: [D] or [1, D]. norm_weight: [D].
    inverse_rms: known ``rsqrt(mean(v_i ** 2) + eps)`` of the leading sources ([tokens], from :func:`inverse_rms_of`),
    which sealed blocks carry with them. output_norm: (weight [D], eps) of an RMSNorm applied to the result.

    Returns [..., D] in the dtype of the sources. Raises ValueError when shapes disagree or there is no source.
    One source is returned as it is (its weight is 1); the query then takes no part and gets no gradient.
    """
    sources = list(sources)
    _check(sources, query, norm_weight)
    if len(sources) == 1:
        if output_norm is None:
            return sources[0]
        return torch.nn.functional.rms_norm(sources[0], sources[0].shape[-1:], *output_norm)
    weight, output_eps = output_norm if output_norm is not None else (None, 0.0)
    known = list(inverse_rms or ())
    return _MixOverDepth.apply(query, norm_weight, weight, eps, output_eps, known, *sources)


def inverse_rms_of(value: Tensor, eps: float) -> Tensor:
    """``rsqrt(mean(value ** 2) + eps)`` per token, flat [tokens], fp32 (fp64 for fp64); not differentiated."""
    with torch.no_grad():
        flat = value.detach().reshape(-1, value.shape[-1])
        norm = torch.linalg.vector_norm(flat, dim=-1, dtype=_work_dtype(value))
        return norm.square_().div_(flat.shape[-1]).add_(eps).rsqrt_()


def scores_of(value: Tensor, folded: Tensor, inverse_rms: Tensor) -> Tensor:
    """Scores of one source: ``folded`` is query * norm_weight, [D] or [D, Q] -> [tokens] or [tokens, Q]."""
    flat = value.reshape(-1, value.shape[-1]).to(folded.dtype)
    raw = flat @ folded
    return raw * (inverse_rms if raw.ndim == 1 else inverse_rms[:, None])


class _MixOverDepth(torch.autograd.Function):
    """Names: T tokens, n sources, D width. All saved per-token tensors are [n, T] in the working dtype."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, norm_weight: Tensor, out_weight: Tensor | None, eps: float,
                out_eps: float, known: list[Tensor], *sources: Tensor) -> Tensor:  # fmt: skip
        shape, dtype = sources[0].shape, sources[0].dtype
        folded = _fold(query, norm_weight, _work_dtype(sources[0]))
        inverse = [*known, *(inverse_rms_of(v, eps) for v in sources[len(known) :])]
        scores = torch.stack([scores_of(v, folded, r) for v, r in zip(sources, inverse, strict=True)])
        weights = torch.softmax(scores, dim=0)
        mixed = _weighted_sum(sources, weights)
        out_inverse = None
        result = mixed
        if out_weight is not None:
            out_inverse = inverse_rms_of(mixed, out_eps)
            result = (mixed * out_inverse[:, None]).mul_(out_weight.to(mixed.dtype))
        ctx.has_output_norm = out_weight is not None
        ctx.save_for_backward(
            query, norm_weight, out_weight, out_inverse, scores, weights, torch.stack(inverse), *sources
        )
        return result.to(dtype).reshape(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, norm_weight, out_weight, out_inverse, scores, weights, inverse, *sources = ctx.saved_tensors
        work = weights.dtype
        gradient = gradient.reshape(-1, gradient.shape[-1]).to(work)
        out_weight_gradient = None
        if ctx.has_output_norm:
            mixed = _weighted_sum(sources, weights)
            gradient, out_weight_gradient = _norm_backward(gradient, mixed, out_inverse, out_weight)
        flat = [source.reshape(-1, source.shape[-1]).to(work) for source in sources]
        product = torch.empty_like(gradient)  # (a product and a sum beat a batched dot product on a CPU)
        pulled = torch.stack([torch.mul(gradient, value, out=product).sum(-1) for value in flat])
        # softmax backward, then score_i = inverse_i * (v_i . folded) with inverse_i a function of v_i
        on_scores = weights * (pulled - (weights * pulled).sum(0))
        on_products = on_scores * inverse
        on_norms = on_products * scores * inverse / -gradient.shape[-1]
        folded = _fold(query, norm_weight, work)
        folded_gradient = torch.zeros_like(folded)
        source_gradients: list[Tensor | None] = []
        for i, (source, value) in enumerate(zip(sources, flat, strict=True)):
            folded_gradient += value.mT @ on_products[i]
            if not ctx.needs_input_grad[6 + i]:
                source_gradients.append(None)
                continue
            grad = gradient * weights[i, :, None]
            grad.addcmul_(value, on_norms[i, :, None]).addr_(on_products[i], folded)
            source_gradients.append(grad.to(source.dtype).reshape(source.shape))
        query_gradient = (folded_gradient * norm_weight).to(query.dtype).reshape(query.shape)
        norm_gradient = (folded_gradient * query.reshape(-1)).to(norm_weight.dtype)
        return query_gradient, norm_gradient, out_weight_gradient, None, None, None, *source_gradients


def _weighted_sum(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    total: Tensor | None = None
    for source, weight in zip(sources, weights, strict=True):
        value = source.reshape(-1, source.shape[-1]).to(weights.dtype)
        total = value * weight[:, None] if total is None else total.addcmul_(value, weight[:, None])
    assert total is not None
    return total


def _norm_backward(gradient: Tensor, value: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Backward of ``value * inverse * weight``, inverse = rsqrt(mean(value ** 2) + eps): d value, d weight."""
    normed = value * inverse[:, None]
    product = gradient * normed
    weight_gradient = product.sum(0)
    scaled = gradient * weight.to(value.dtype)
    along = torch.mul(scaled, normed, out=product).sum(-1).div_(value.shape[-1])
    value_gradient = scaled.sub_(normed.mul_(along[:, None])).mul_(inverse[:, None])
    return value_gradient, weight_gradient.to(weight.dtype)


def _fold(query: Tensor, norm_weight: Tensor, dtype: torch.dtype) -> Tensor:
    return query.reshape(-1).to(dtype) * norm_weight.to(dtype)


def _work_dtype(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _check(sources: list[Tensor], query: Tensor, norm_weight: Tensor) -> None:
    if not sources:
        raise ValueError("mix_over_depth needs at least one source (the embedding is the first)")
    width = sources[0].shape[-1]
    for name, tensor in (("query", query), ("norm_weight", norm_weight)):
        if tensor.numel() != width:
            raise ValueError(f"{name} has {tensor.numel()} values, the sources have width {width}")
    if any(source.shape != sources[0].shape for source in sources):
        raise ValueError(f"sources differ in shape: {[tuple(source.shape) for source in sources]}")
