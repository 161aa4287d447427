"""Gated feed-forward experts applied to the tokens routed to them.

Shapes: T tokens of width D, k experts per token, R = T k routed rows, E experts of inner width M.
``gate_up`` [E, 2 M, D] (gate rows first), ``down`` [E, D, M]::

    out_t = sum_j weights[t, j] * down[e] activation(gate_up[e] x_t),      e = indices[t, j]

:func:`experts_reference` is the definition. :func:`grouped_experts` sorts the rows by expert and runs one pair of
products per expert on a contiguous slice, with a backward written by hand: gradients of the stacked weights are written
slice by slice (indexing the stack in autograd would add a full-size gradient per expert), nothing is kept but the
expert inputs' pre-activations, and the gradient of a routing weight comes from ``(down^T d_out) . activation`` so that
expert outputs need not be kept (Kimi K3 report, section 5.2.2). On CUDA in bf16, torch's grouped product is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .gated_activation import GatedActivation, gated


def experts_reference(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: GatedActivation
) -> Tensor:
    """The definition: every expert on every one of its tokens, one at a time."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        for slot in range(indices.shape[1]):
            rows = (indices[:, slot] == expert).nonzero().squeeze(-1)
            gate, up = (x[rows] @ gate_up[expert].mT).chunk(2, dim=-1)
            value = activation.value(gate, up) @ down[expert].mT
            out = out.index_add(0, rows, value * weights[rows, slot, None].to(x.dtype))
    return out


class Sorted(NamedTuple):
    """Routed rows in expert order. token [R]: row -> token. place [T, k]: (token, slot) -> row. ends: host offsets."""

    order: Tensor
    token: Tensor
    place: Tensor
    counts: Tensor
    starts: list[int]


def sort_by_expert(indices: Tensor, experts: int) -> Sorted:
    flat = indices.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(flat, minlength=experts)
    return Sorted(
        order,
        torch.div(order, indices.shape[-1], rounding_mode="floor"),
        place.view_as(indices),
        counts,
        [0, *counts.cumsum(0).tolist()],
    )


def why_not_grouped_product(x: Tensor, gate_up: Tensor) -> str | None:
    """Why torch's grouped product is not taken for these inputs, or None if it is."""
    if not hasattr(F, "grouped_mm"):
        return "this torch has no torch.nn.functional.grouped_mm"
    if x.device.type != "cuda":
        return f"device is {x.device.type}; the per-expert loop is as fast there"
    if x.dtype != torch.bfloat16:
        return f"dtype is {x.dtype}; the grouped product takes bfloat16"
    if x.shape[-1] % 8 or gate_up.shape[1] % 16:
        return f"width {x.shape[-1]} and expert width {gate_up.shape[1] // 2} must be multiples of 8 (16-byte rows)"
    return None


def grouped_experts(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: GatedActivation
) -> Tensor:
    """x [T, D], indices and weights [T, k] -> [T, D] in the dtype of x; products in the dtype of x, combined in fp32.

    An expert that receives no token gets a zero gradient (never None).
    """
    rows = sort_by_expert(indices, len(gate_up))
    gate_up, down = gate_up.to(x.dtype), down.to(x.dtype)
    if why_not_grouped_product(x, gate_up) is None:
        return grouped_product_experts(x, rows, weights, gate_up, down, activation)
    return _LoopExperts.apply(x, weights, gate_up, down, rows, activation)


def grouped_product_experts(
    x: Tensor, rows: Sorted, weights: Tensor, gate_up: Tensor, down: Tensor, activation: GatedActivation
) -> Tensor:
    """The same through torch.nn.functional.grouped_mm: static shapes, no host synchronisation in the products."""
    ends = rows.counts.cumsum(0).to(torch.int32)
    hidden = F.grouped_mm(x[rows.token], gate_up.mT, offs=ends)
    gate, up = hidden.chunk(2, dim=-1)
    value = F.grouped_mm(gated(activation, gate, up), down.mT, offs=ends)
    scaled = value.float() * weights.reshape(-1)[rows.order, None].float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add(0, rows.token, scaled).to(x.dtype)


class _LoopExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, rows: Sorted,
                activation: GatedActivation) -> Tensor:  # fmt: skip
        routed, width = len(rows.token), x.shape[-1]
        hidden, value = x.new_empty(routed, gate_up.shape[1]), x.new_empty(routed, width)
        for expert, piece in _pieces(rows):
            torch.mm(x.index_select(0, rows.token[piece]), gate_up[expert].mT, out=hidden[piece])
            inner = activation.value(*hidden[piece].chunk(2, dim=-1))
            torch.mm(inner, down[expert].mT, out=value[piece])
        ctx.rows, ctx.activation = rows, activation
        ctx.save_for_backward(x, weights, gate_up, down, hidden)
        return combine(value, rows.place, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, hidden = ctx.saved_tensors
        rows: Sorted = ctx.rows
        sorted_weights = weights.reshape(-1)[rows.order].to(x.dtype)
        d_weight = torch.empty_like(sorted_weights)
        d_rows = torch.empty(len(rows.token), x.shape[-1], dtype=x.dtype, device=x.device)
        d_gate_up, d_down = torch.empty_like(gate_up), torch.empty_like(down)
        for expert in (rows.counts == 0).nonzero().flatten().tolist():
            d_gate_up[expert].zero_()
            d_down[expert].zero_()
        for expert, piece in _pieces(rows):
            token, weight = rows.token[piece], sorted_weights[piece, None]
            d_out = gradient.index_select(0, token)
            pulled = d_out @ down[expert]  # gradient of the inner activation, routing weight left out
            gate, up = hidden[piece].chunk(2, dim=-1)
            d_hidden = torch.empty_like(hidden[piece])
            inner, d_hidden[:, : gate.shape[1]], d_hidden[:, gate.shape[1] :] = ctx.activation.backward(
                gate, up, pulled * weight
            )
            d_weight[piece] = torch.einsum("rm,rm->r", pulled, inner)
            torch.mm(d_out.mT, inner.mul_(weight), out=d_down[expert])
            torch.mm(d_hidden.mT, x.index_select(0, token), out=d_gate_up[expert])
            torch.mm(d_hidden, gate_up[expert], out=d_rows[piece])
        d_x = combine(d_rows, rows.place, None)
        d_weights = d_weight[rows.place.reshape(-1)].view_as(weights).to(weights.dtype)
        return d_x, d_weights, d_gate_up, d_down, None, None


def _pieces(rows: Sorted) -> list[tuple[int, slice]]:
    """(expert, its rows) for every expert that has any."""
    bounds = zip(rows.starts, rows.starts[1:], strict=False)
    return [(expert, slice(a, b)) for expert, (a, b) in enumerate(bounds) if b > a]


def combine(value: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """[T, D]: each token's sum over its rows ``value[place[t]]``, weighted if ``weights`` [T, k] are given, in fp32."""
    wide = value if value.dtype in (torch.float32, torch.float64) else value.float()
    if len(wide) == 0:
        return value.new_zeros(place.shape[0], value.shape[-1]) + value.sum()
    scale = None if weights is None else weights.to(wide.dtype)
    if value.device.type in ("cpu", "cuda"):  # one fused pass
        return F.embedding_bag(place, wide, mode="sum", per_sample_weights=scale).to(value.dtype)
    rows = wide[place]
    return (rows if scale is None else rows * scale[..., None]).sum(1).to(value.dtype)
