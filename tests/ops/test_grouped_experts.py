"""Grouped expert products against the definition, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.ops.gated_activation import SituGLUActivation, SwiGLUActivation
from triscale.ops.grouped_experts import (
    experts_reference,
    grouped_experts,
    grouped_product_experts,
    sort_by_expert,
    why_not_grouped_product,
)


def make(tokens=17, experts=5, top_k=2, width=6, hidden=4, seed=0, dtype=torch.float64, used=None):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    scores = torch.rand(tokens, used or experts, generator=g)
    indices = scores.topk(top_k, dim=-1).indices
    weights = torch.rand(tokens, top_k, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return draw(tokens, width), indices, weights, draw(experts, 2 * hidden, width), draw(experts, width, hidden)


def both(inputs, activation):
    x, indices, weights, gate_up, down = inputs
    leaves = [x, weights, gate_up, down]
    results = []
    for function in (grouped_experts, experts_reference):
        out = function(x, indices, weights, gate_up, down, activation)
        upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out, torch.autograd.grad(out, leaves, upstream)))
    return results


@given(
    tokens=st.integers(0, 30), experts=st.integers(1, 7), data=st.data(), seed=st.integers(0, 999),
    width=st.integers(1, 9), hidden=st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_equals_definition(tokens, experts, data, seed, width, hidden):
    top_k = data.draw(st.integers(1, experts))
    used = data.draw(st.integers(top_k, experts))
    activation = data.draw(st.sampled_from([SwiGLUActivation(), SituGLUActivation(1.5, 3.0)]))
    (out, got), (expected, wanted) = both(make(tokens, experts, top_k, width, hidden, seed, used=used), activation)
    torch.testing.assert_close(out, expected)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_gradcheck():
    x, indices, weights, gate_up, down = make(tokens=4, experts=3, width=3, hidden=2)
    run = lambda x, w, a, b: grouped_experts(x, indices, w, a, b, SwiGLUActivation())
    assert torch.autograd.gradcheck(run, (x, weights, gate_up, down))


def test_experts_without_tokens_get_zero_gradients():
    inputs = make(experts=6, used=2)
    (_, (_, _, d_gate_up, d_down)), _ = both(inputs, SwiGLUActivation())
    assert (d_gate_up[2:] == 0).all() and (d_down[2:] == 0).all() and d_down[:2].abs().sum() > 0


def test_rows_are_sorted_stably_and_places_invert_them():
    indices = torch.tensor([[2, 0], [0, 1], [2, 1]])
    rows = sort_by_expert(indices, 4)
    assert rows.token.tolist() == [0, 1, 1, 2, 0, 2] and rows.counts.tolist() == [2, 2, 2, 0]
    assert torch.equal(rows.token[rows.place], torch.arange(3)[:, None].expand(3, 2))


def test_grouped_product_of_torch_agrees_and_declines_with_a_reason():
    x, indices, weights, gate_up, down = make(tokens=40, width=16, hidden=16, dtype=torch.bfloat16)
    assert "cpu" in why_not_grouped_product(x, gate_up)
    rows = sort_by_expert(indices, 5)
    out = grouped_product_experts(x, rows, weights, gate_up, down, SwiGLUActivation())
    wide = (x.double(), indices, weights.double(), gate_up.double(), down.double())
    expected = experts_reference(*(t.detach() for t in wide), SwiGLUActivation())
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.05 * float(expected.std()))
    leaves, upstream = [x, weights, gate_up, down], torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, upstream)
    loop = torch.autograd.grad(
        grouped_experts(x, indices, weights, gate_up, down, SwiGLUActivation()), leaves, upstream
    )
    for a, b in zip(got, loop, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.1, atol=0.05 * float(b.float().std()))


def test_bf16_is_combined_in_fp32():
    x, indices, weights, gate_up, down = make(tokens=64, width=32, hidden=16, dtype=torch.bfloat16)
    out = grouped_experts(x, indices, weights.float(), gate_up, down, SwiGLUActivation())
    assert out.dtype == torch.bfloat16
    wide = (x.double(), indices, weights.double(), gate_up.double(), down.double())
    exact = experts_reference(*(t.detach() for t in wide), SwiGLUActivation())
    torch.testing.assert_close(out.double(), exact, rtol=0.03, atol=0.03 * float(exact.std()))


@pytest.mark.parametrize("frozen", ["gate_up", "x"])
def test_frozen_inputs_are_fine(frozen):
    x, indices, weights, gate_up, down = make()
    (x if frozen == "x" else gate_up).requires_grad_(False)
    grouped_experts(x, indices, weights, gate_up, down, SwiGLUActivation()).sum().backward()
    assert down.grad is not None and (x if frozen == "x" else gate_up).grad is None
