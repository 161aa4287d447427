"""Routing and balancing rules: their definitions, their invariants, and how fast they settle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.ops.routing import (
    balanced_scaling,
    bias_from_histogram,
    choose_experts,
    cutoffs,
    expert_load,
    quantile_bias,
    quantiles_from_histogram,
    required_bias_histogram,
    route,
    sequence_balance_loss,
    sign_bias,
)


def skewed(tokens, experts, seed=0, skew=1.0):
    g = torch.Generator().manual_seed(seed)
    offset = skew * torch.randn(experts, generator=g)
    return lambda: torch.sigmoid(torch.randn(tokens, experts, generator=g) + offset)


def max_load(scores, bias, top_k):
    load = expert_load(choose_experts(scores, bias, top_k), scores.shape[1]).double()
    return float(load.max() / load.mean())


def test_weights_are_unbiased_scores_renormalised_and_scaled():
    scores, bias = skewed(50, 8)(), torch.linspace(-1, 1, 8)
    routing = route(scores, bias, 3, scaling=2.5)
    chosen = scores.gather(1, routing.indices)
    torch.testing.assert_close(routing.weights, 2.5 * chosen / chosen.sum(1, keepdim=True))
    raw = route(scores, bias, 3, renormalize=False)
    assert torch.equal(raw.weights, chosen)
    biased = (scores + bias).gather(1, routing.indices)
    assert (biased[:, :-1] >= biased[:, 1:]).all()


def test_no_gradient_flows_through_the_bias():
    scores, bias = skewed(20, 8)().requires_grad_(), torch.zeros(8, requires_grad=True)
    grads = torch.autograd.grad(route(scores, bias, 2).weights.square().sum(), [scores, bias], allow_unused=True)
    assert grads[0].abs().sum() > 0 and grads[1] is None


@given(shift=st.floats(-3, 3), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_a_constant_added_to_the_bias_changes_no_choice(shift, seed):
    scores = skewed(64, 12, seed)().double()
    bias = 0.1 * torch.randn(12, dtype=torch.float64)
    a, b = route(scores, bias, 3), route(scores, bias + shift, 3)
    assert torch.equal(a.indices, b.indices) and torch.equal(a.weights, b.weights)


def test_group_limited_choice_against_a_loop():
    scores, bias = skewed(40, 12)(), 0.2 * torch.randn(12)
    got = choose_experts(scores, bias, 4, groups=4, top_groups=2)
    for row, chosen in zip(scores + bias, got, strict=True):
        groups = row.view(4, 3)
        best = sorted(range(4), key=lambda g: -float(groups[g].topk(2).values.sum()))[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        assert set(chosen.tolist()) == set(sorted(allowed, key=lambda e: -float(row[e]))[:4])


def test_quantile_gives_every_expert_its_share_once_cutoffs_are_fixed():
    scores, bias = skewed(800, 16)().double(), 0.1 * torch.randn(16, dtype=torch.float64)
    alpha = cutoffs(scores, bias, 3)
    new = quantile_bias(scores, bias, 3)
    margins = scores - alpha[:, None]
    for expert, edge in enumerate(margins.kthvalue(800 - 150, dim=0).values):
        above, tied = int((margins[:, expert] > edge).sum()), int((margins[:, expert] == edge).sum())
        assert above <= 150 < above + tied  # exactly 150 unless the expert is itself the cutoff of many tokens
        assert float(new[expert] + edge) == pytest.approx(float(new[0] + margins[:, 0].kthvalue(650).values))
    assert abs(float(new.mean())) < 1e-12


def test_worked_example_of_four_experts():
    """8 tokens, 4 experts, one choice each: loads (4, 3, 1, 0) become (2, 2, 2, 2)."""
    scores = torch.tensor(
        [[0.90, 0.30, 0.20, 0.10], [0.80, 0.30, 0.25, 0.10], [0.70, 0.20, 0.45, 0.50], [0.60, 0.35, 0.30, 0.55],
         [0.20, 0.90, 0.30, 0.10], [0.25, 0.80, 0.35, 0.20], [0.10, 0.60, 0.55, 0.30], [0.20, 0.30, 0.70, 0.40]],
        dtype=torch.float64,
    )  # fmt: skip
    bias = torch.zeros(4, dtype=torch.float64)
    assert expert_load(choose_experts(scores, bias, 1), 4).tolist() == [4, 3, 1, 0]
    for _ in range(3):
        bias = quantile_bias(scores, bias, 1)
    assert expert_load(choose_experts(scores, bias, 1), 4).tolist() == [2, 2, 2, 2]


def test_quantile_balancing_settles_in_a_few_steps_where_the_sign_rule_does_not():
    """8,192 tokens, 64 experts, top-4, skewed start."""
    batch = skewed(8192, 64)
    scores, bias = batch(), torch.zeros(64)
    start = max_load(scores, bias, 4)
    first = quantile_bias(scores, bias, 4)
    bias = first
    for _ in range(5):
        bias = quantile_bias(scores, bias, 4)
    assert start > 4 and max_load(scores, first, 4) < 1.5 and max_load(scores, bias, 4) < 1.05
    signed = torch.zeros(64)
    for _ in range(20):
        signed = sign_bias(signed, expert_load(choose_experts(scores, signed, 4), 64), 1e-3)
    assert max_load(scores, signed, 4) > 3


@pytest.mark.slow
def test_quantile_balancing_of_896_experts():
    """Kimi K3's size: 896 experts, top-16, batches of 32,768 tokens, skewed start."""
    batch = skewed(32768, 896, skew=0.5)
    scores, bias = batch(), torch.zeros(896)
    assert max_load(scores, bias, 16) > 10
    assert max_load(scores, quantile_bias(scores, bias, 16), 16) < 1.2
    for _ in range(3):
        bias = quantile_bias(batch(), bias, 16)
    assert max_load(batch(), bias, 16) < 1.3


@given(seed=st.integers(0, 999), bins=st.sampled_from([10, 100, 1000]), spread=st.floats(0, 2))
@settings(max_examples=30, deadline=None)
def test_histogram_is_within_one_bin_of_the_exact_quantile(seed, bins, spread):
    scores = skewed(500, 10, seed)().double()
    bias = spread * torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    counts = required_bias_histogram(scores, bias, 3, bins)
    assert (counts.sum(1) == 500).all()
    width = (float(bias.max() - bias.min()) + 2) / bins
    required = cutoffs(scores, bias, 3)[:, None] - scores
    exact = required.kthvalue(150, dim=0).values
    assert float((quantiles_from_histogram(counts, bias, 3) - exact).abs().max()) <= width + 1e-9
    got = bias_from_histogram(counts, bias, 3)
    assert float((got - (exact - exact.mean())).abs().max()) <= 2 * width + 1e-9  # centring adds the mean error


def test_histograms_of_parts_add_up():
    scores, bias = skewed(300, 8)(), 0.1 * torch.randn(8)
    whole = required_bias_histogram(scores, bias, 2, 64)
    parts = sum(required_bias_histogram(piece, bias, 2, 64) for piece in scores.split([100, 1, 199]))
    assert torch.equal(whole, parts)
    assert torch.equal(bias_from_histogram(whole, bias, 2), bias_from_histogram(parts, bias, 2))


def test_no_tokens_leave_the_bias_alone():
    bias = torch.randn(8)
    assert torch.equal(bias_from_histogram(torch.zeros(8, 10, dtype=torch.int64), bias, 2), bias)
    assert torch.equal(quantile_bias(torch.zeros(0, 8), bias, 2), torch.zeros(8))


def test_sign_update_is_centred_and_pushes_against_load():
    bias = sign_bias(torch.zeros(4), torch.tensor([10, 1, 1, 0]), 1e-3)
    assert abs(float(bias.sum())) < 1e-9 and bias[0] < 0 < bias[3]
    for _ in range(100):
        bias = sign_bias(bias, torch.tensor([10, 1, 1, 0]), 1e-3)
    assert abs(float(bias.mean())) < 1e-7
    assert torch.equal(sign_bias(bias, torch.full((4,), 7), 1e-3), bias)


def test_top_k_of_all_experts_cannot_be_balanced():
    with pytest.raises(ValueError, match="top_k"):
        quantile_bias(torch.rand(4, 3), torch.zeros(3), 3)


@pytest.mark.parametrize(("experts", "top_k", "published"), [(64, 6, 2.446), (384, 8, 2.827), (896, 16, 4.0)])
def test_scaling_rule_gives_the_published_factors(experts, top_k, published):
    assert balanced_scaling(experts, top_k, samples=4000) == pytest.approx(published, abs=2e-3)


def test_sequence_loss_against_its_definition_and_packed_equals_separate():
    scores, lengths = skewed(30, 6)().double().requires_grad_(), [7, 0, 23]
    indices = choose_experts(scores, torch.zeros(6), 2)
    total = sequence_balance_loss(scores, indices, lengths)
    expected, start = torch.zeros((), dtype=torch.float64), 0
    for n in (7, 23):
        s, i = scores[start : start + n], indices[start : start + n]
        f = torch.stack([(i == e).sum() for e in range(6)]).double() * 6 / (2 * n)
        p = (s / s.sum(1, keepdim=True)).mean(0)
        expected = expected + n * (f * p).sum()
        start += n
    torch.testing.assert_close(total, expected)
    a, b = (torch.autograd.grad(t, scores, retain_graph=True)[0] for t in (total, expected))
    torch.testing.assert_close(a, b)


def test_sequence_loss_is_one_per_token_at_balance():
    scores = torch.full((12, 4), 0.5)
    indices = torch.arange(12)[:, None] % 4
    assert float(sequence_balance_loss(scores, indices, [12])) == pytest.approx(12.0)
