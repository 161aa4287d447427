"""The mixing operator of Attention Residuals against its definition, forward and backward, on hostile inputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.ops import mix_over_depth
from triscale.ops.depth_attention import inverse_rms_of, mix_over_depth_reference

EPS = 1e-5


def make(sources=3, shape=(1, 7), width=12, scale=1.0, query_scale=0.5, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=g, dtype=dtype)
    values = [(scale * draw(*shape, width)).requires_grad_() for _ in range(sources)]
    query, weight = (query_scale * draw(width)).requires_grad_(), (1 + 0.3 * draw(width)).requires_grad_()
    return values, query, weight, draw


def gradients(function, values, query, weight, upstream, **options):
    out = function(values, query, weight, EPS, **options)
    return out, torch.autograd.grad(out, [*values, query, weight], upstream)


HOSTILE = {
    "plain": {},
    "two sources": {"sources": 2},
    "zero query": {"query_scale": 0.0},
    "sharp query": {"query_scale": 40.0},
    "huge values": {"scale": 1e6},
    "tiny values": {"scale": 1e-6},
    "many sources": {"sources": 33, "width": 5},
    "width one": {"width": 1},
    "single token": {"shape": (1, 1)},
    "batched": {"shape": (2, 3, 4)},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_equals_definition_forward_and_backward(case):
    values, query, weight, draw = make(**HOSTILE[case])
    upstream = draw(*values[0].shape)
    out, got = gradients(mix_over_depth, values, query, weight, upstream)
    expected, wanted = gradients(mix_over_depth_reference, values, query, weight, upstream)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().max()) + 1e-14)


def test_zero_values_stay_finite():
    values, query, weight, draw = make()
    values[1] = torch.zeros_like(values[1]).requires_grad_()
    out, got = gradients(mix_over_depth, values, query, weight, draw(*values[0].shape))
    assert out.isfinite().all() and all(g.isfinite().all() for g in got)


@pytest.mark.parametrize("with_norm", [False, True])
def test_gradcheck(with_norm):
    values, query, weight, draw = make(sources=3, shape=(4,), width=5)
    out_weight = (1 + 0.2 * draw(5)).requires_grad_()

    def run(query, weight, out_weight, *values):
        return mix_over_depth(values, query, weight, EPS, output_norm=(out_weight, 1e-6) if with_norm else None)

    inputs = (query, weight, out_weight, *values)
    assert (
        torch.autograd.gradcheck(run, inputs)
        if with_norm
        else torch.autograd.gradcheck(lambda q, w, *v: run(q, w, None, *v), (query, weight, *values))
    )


def test_fused_norm_equals_norm_after():
    values, query, weight, draw = make()
    out_weight, upstream = (1 + 0.2 * draw(12)).requires_grad_(), draw(*values[0].shape)
    fused = mix_over_depth(values, query, weight, EPS, output_norm=(out_weight, 1e-6))
    apart = torch.nn.functional.rms_norm(mix_over_depth_reference(values, query, weight, EPS), (12,), out_weight, 1e-6)
    torch.testing.assert_close(fused, apart)
    leaves = [*values, query, weight, out_weight]
    for a, b in zip(
        torch.autograd.grad(fused, leaves, upstream), torch.autograd.grad(apart, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_zero_query_is_the_mean_and_not_the_sum():
    values, query, weight, _ = make(query_scale=0.0)
    torch.testing.assert_close(mix_over_depth(values, query, weight, EPS), torch.stack(values).mean(0))


def test_one_source_is_returned_untouched_and_its_query_gets_no_gradient():
    values, query, weight, _draw = make(sources=1)
    out = mix_over_depth(values, query, weight, EPS)
    assert out is values[0]
    grads = torch.autograd.grad(out.sum(), [values[0], query], allow_unused=True)
    assert grads[1] is None


def test_known_inverse_rms_changes_nothing():
    values, query, weight, draw = make()
    upstream = draw(*values[0].shape)
    known = [inverse_rms_of(v, EPS) for v in values[:2]]
    plain = gradients(mix_over_depth, values, query, weight, upstream)
    given_ = gradients(mix_over_depth, values, query, weight, upstream, inverse_rms=known)
    assert torch.equal(plain[0], given_[0]) and all(map(torch.equal, plain[1], given_[1]))


def test_bf16_is_computed_in_fp32_and_cast_once():
    values, query, weight, _ = make(sources=6, width=64, dtype=torch.float32)
    low = [v.detach().bfloat16() for v in values]
    exact = mix_over_depth_reference([v.double() for v in low], query.double(), weight.double(), EPS)
    assert torch.equal(mix_over_depth(low, query, weight, EPS), exact.bfloat16())


def test_sources_without_gradient_are_skipped():
    values, query, weight, draw = make()
    frozen = [values[0].detach(), *values[1:]]
    out = mix_over_depth(frozen, query, weight, EPS)
    grads = torch.autograd.grad(out, [*values[1:], query], draw(*out.shape))
    assert all(g.abs().sum() > 0 for g in grads)


def test_saved_tensors_are_the_sources_and_two_numbers_per_token():
    """Nothing of size [tokens, width] is kept but the sources themselves."""
    values, query, weight, draw = make(sources=4, shape=(1, 64), width=32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        mix_over_depth(values, query, weight, EPS, output_norm=((1 + draw(32)).requires_grad_(), EPS))
    addresses = {v.data_ptr() for v in values}
    own = [t for t in saved if t.data_ptr() not in addresses]
    assert max(t.numel() for t in own) <= 4 * 64


@given(sources=st.integers(2, 6), tokens=st.integers(1, 9), width=st.integers(1, 17), seed=st.integers(0, 9999))
@settings(max_examples=40, deadline=None)
def test_any_shape(sources, tokens, width, seed):
    values, query, weight, draw = make(sources, (tokens,), width, query_scale=2.0, seed=seed)
    upstream = draw(tokens, width)
    out, got = gradients(mix_over_depth, values, query, weight, upstream)
    expected, wanted = gradients(mix_over_depth_reference, values, query, weight, upstream)
    torch.testing.assert_close(out, expected)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_errors_name_the_problem():
    values, query, weight, _ = make()
    with pytest.raises(ValueError, match="at least one source"):
        mix_over_depth([], query, weight)
    with pytest.raises(ValueError, match="width 12"):
        mix_over_depth(values, query[:3], weight)
    with pytest.raises(ValueError, match="differ in shape"):
        mix_over_depth([values[0], values[1][:, :2]], query, weight)
