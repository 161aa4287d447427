"""The chunked gated delta rule against its definition: layouts, gates, dtypes, gradients, packing, errors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.config import TriScaleError
from triscale.ops import gated_delta_rule, gated_delta_rule_step

GATES = {
    "none": lambda u: torch.zeros_like(u),
    "mild": lambda u: -0.2 * u,
    "initial": lambda u: -1.6 * u * u,
    "bounded": lambda u: -5 * u,
    "strong": lambda u: -20 * u,
    "mixed": lambda u: torch.where(u < 0.5, -0.01 * u, -30 * u),
    "erasing": lambda u: torch.where(u < 0.2, torch.full_like(u, -torch.inf), -u),
    "one wild channel": lambda u: torch.cat([-200 * u[..., :1], -0.1 * u[..., 1:]], dim=-1),
}


def make(tokens, gate="mild", *, batch=1, heads=2, value_heads=None, keys=8, values=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    value_heads = value_heads or heads
    q, k = (F.normalize(draw(batch, tokens, heads, keys), dim=-1) for _ in range(2))
    v = draw(batch, tokens, value_heads, values)
    g = GATES[gate](torch.rand(batch, tokens, value_heads, keys, generator=generator, dtype=torch.float64))
    beta = torch.rand(batch, tokens, value_heads, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


def state_of(sequences, heads=2, keys=8, values=6, dtype=torch.float64, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sequences, heads, keys, values, generator=generator, dtype=dtype).requires_grad_()


def run(leaves, initial=None, weight_seed=5, **options):
    """Output, final state and all gradients of a random linear functional of both."""
    out, final = gated_delta_rule(*leaves, initial_state=initial, **options)
    generator = torch.Generator().manual_seed(weight_seed)
    loss = (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
    if final is not None:
        loss = loss + (final.double() * torch.randn(final.shape, generator=generator, dtype=torch.float64)).sum()
    wanted = [*leaves, initial] if initial is not None else list(leaves)
    return [
        out,
        *([final] if final is not None else []),
        *torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True),
    ]


def assert_same(found, expected, tolerance):
    assert len(found) == len(expected)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.isfinite(a).all(), index
        error = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        scale = max(1.0, b.double().abs().max().item()) if b.numel() else 1.0
        assert error <= tolerance * scale, (index, error)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 3e-5)])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_chunked_equals_definition(gate, tokens, dtype, tolerance):
    leaves, initial = make(tokens, gate, batch=2, dtype=dtype), state_of(2, dtype=dtype)
    options = {"output_final_state": True}
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = run(exact, initial.detach().double().requires_grad_(), path="reference", **options)
    assert_same(run(leaves, initial, path="chunked", **options), expected, tolerance)


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("gate", ["mild", "bounded", "mixed"])
def test_chunk_size_does_not_matter(chunk_size, gate):
    leaves = make(150, gate)
    assert_same(run(leaves, chunk_size=chunk_size, path="chunked"), run(leaves, path="reference"), 1e-12)


@pytest.mark.parametrize("budget", [1, 3000, 1 << 30])
@pytest.mark.parametrize("gate", ["mild", "strong"])
def test_segments_do_not_matter(monkeypatch, budget, gate):
    monkeypatch.setattr("triscale.ops.delta_rule.chunked.SEGMENT_ELEMENTS", budget)
    leaves, initial = make(300, gate, batch=3), state_of(3)
    options = {"output_final_state": True}
    assert_same(run(leaves, initial, **options), run(leaves, initial, path="reference", **options), 1e-12)
    lengths = (3, 0, 130, 64, 1, 102)
    packed = make(300, gate)
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    expected = run(packed, cu_seqlens=offsets, path="reference")
    assert_same(run(packed, cu_seqlens=offsets), expected, 1e-12)


def test_gradcheck():
    for gate in ("mild", "strong"):
        leaves, initial = make(19, gate, heads=1, keys=3, values=2), state_of(1, 1, 3, 2)
        call = lambda *x: gated_delta_rule(*x[:5], initial_state=x[5], output_final_state=True, path="chunked")
        assert torch.autograd.gradcheck(call, (*leaves, initial))


@pytest.mark.parametrize("gate", ["mild", "bounded"])
def test_grouped_value_heads(gate):
    leaves = make(70, gate, heads=2, value_heads=6)
    expected = run(leaves, path="reference")
    assert_same(run(leaves), expected, 1e-12)
    alone = [leaves[0][:, :, 1:], leaves[1][:, :, 1:], leaves[2][:, :, 4:5], leaves[3][:, :, 4:5], leaves[4][:, :, 4:5]]
    out, _ = gated_delta_rule(*alone, path="reference")
    assert_same([out], [expected[0][:, :, 4:5]], 1e-12)


def test_scalar_decay_is_a_broadcast_gate():
    q, k, v, g, beta = make(70, "mild")
    scalar = g[..., 0].detach().requires_grad_()
    wide = scalar.unsqueeze(-1).expand(g.shape)
    out, _ = gated_delta_rule(q, k, v, scalar, beta)
    other, _ = gated_delta_rule(q, k, v, wide, beta, path="reference")
    assert_same([out], [other], 1e-12)
    (dg,) = torch.autograd.grad(out.sum(), scalar)
    (expected,) = torch.autograd.grad(other.sum(), scalar)
    assert_same([dg], [expected], 1e-12)


def test_low_precision_inputs_are_accumulated_in_fp32():
    leaves = make(130, "bounded", dtype=torch.bfloat16)
    out, final = gated_delta_rule(*leaves, output_final_state=True)
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
    exact = gated_delta_rule(*(x.double() for x in leaves), output_final_state=True, path="reference")
    assert (final - exact[1]).abs().max() < 1e-5
    assert (out.double() - exact[0]).abs().max() <= 0.5 * 2**-7 * exact[0].abs().max()
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert all(g.dtype == torch.bfloat16 and torch.isfinite(g).all() for g in grads)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 5), st.integers(10, 70), st.just(64)), min_size=1, max_size=6),
    gate=st.sampled_from(sorted(GATES)),
    initial=st.booleans(),
    final=st.booleans(),
    chunk_size=st.sampled_from([16, 64]),
)
def test_packed_equals_separate(lengths, gate, initial, final, chunk_size):
    total = sum(lengths)
    leaves = make(total, gate)
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    states = state_of(len(lengths)) if initial else None
    options = {"output_final_state": final}
    found = run(leaves, states, cu_seqlens=offsets, chunk_size=chunk_size, path="chunked", **options)
    expected = run(leaves, states, cu_seqlens=offsets, path="reference", **options)
    assert_same(found, expected, 1e-11)


@pytest.mark.parametrize("lengths", [[40, 40, 40], [64, 64], [7] * 9, [5, 90, 1, 0, 24]])
def test_a_document_does_not_see_its_neighbours(lengths):
    leaves = make(sum(lengths), "mild")
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    packed, _ = gated_delta_rule(*leaves, cu_seqlens=offsets)
    for a, b in itertools.pairwise(offsets):
        solo, _ = gated_delta_rule(*(x[:, a:b] for x in leaves))
        assert_same([packed[:, a:b]], [solo], 1e-12)


@pytest.mark.parametrize("padding", [1, 31, 64, 200])
@pytest.mark.parametrize("gate", ["mild", "strong"])
def test_padding_leaves_the_state_bit_equal(gate, padding):
    leaves = make(77, gate, dtype=torch.float32)
    extra = make(padding, "none", dtype=torch.float32, seed=4)
    extra[4] = torch.zeros_like(extra[4])  # beta = 0 and g = 0: nothing is written, nothing decays
    padded = [torch.cat([a, b], dim=1) for a, b in zip(leaves, extra, strict=True)]
    for chunk_size in (16, 64):
        _, short = gated_delta_rule(*leaves, output_final_state=True, chunk_size=chunk_size, path="chunked")
        _out, final = gated_delta_rule(*padded, output_final_state=True, chunk_size=chunk_size, path="chunked")
        assert torch.equal(short, final)


@settings(max_examples=25, deadline=None)
@given(prefill=st.integers(0, 140), steps=st.integers(1, 4), gate=st.sampled_from(sorted(GATES)))
def test_prefill_and_decode_equal_one_pass(prefill, steps, gate):
    leaves = [x.detach() for x in make(prefill + steps, gate, batch=2)]
    whole, final = gated_delta_rule(*leaves, output_final_state=True)
    first, state = gated_delta_rule(*(x[:, :prefill] for x in leaves), output_final_state=True)
    address = state.data_ptr()
    rest = gated_delta_rule_step(*(x[:, prefill:] for x in leaves), state)
    assert state.data_ptr() == address
    assert_same([torch.cat([first, rest], dim=1), state], [whole, final], 1e-12)


def test_state_layout_is_keys_before_values():
    q, k, v, g, beta = (x.detach() for x in make(1, keys=5, values=3))
    _, state = gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    assert state.shape == (1, 2, 5, 3)
    assert torch.allclose(state[0, 1], beta[0, 0, 1] * torch.outer(k[0, 0, 1], v[0, 0, 1]))


def test_no_token_returns_the_initial_state():
    leaves, initial = make(0, batch=2), state_of(2)
    for path in ("chunked", "reference"):
        out, final = gated_delta_rule(*leaves, initial_state=initial, output_final_state=True, path=path)
        assert out.shape == (2, 0, 2, 6) and torch.equal(final, initial)


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda a: a.update(k=a["k"][..., :4]), "q and k"),
        (lambda a: a.update(v=a["v"][:, :3]), "shape of v"),
        (lambda a: a.update(g=a["g"][..., :3]), "shape of g"),
        (lambda a: a.update(beta=a["beta"][:, :3]), "beta"),
        (lambda a: a.update(v=a["v"][:, :, :1].expand(-1, -1, 3, -1)), "value heads"),
        (lambda a: a.update(cu_seqlens=[0, 5]), "cu_seqlens"),
        (lambda a: a.update(cu_seqlens=[0, 7, 5, 9]), "cu_seqlens"),
        (lambda a: a.update(initial_state=torch.zeros(1, 2, 6, 8)), "initial_state"),
        (lambda a: a.update(chunk_size=48), "chunk_size"),
        (lambda a: a.update(path="fast"), "path"),
    ],
)
def test_errors_name_the_argument(change, named):
    arguments = dict(zip(("q", "k", "v", "g", "beta"), make(9), strict=True))
    change(arguments)
    with pytest.raises(TriScaleError, match=named):
        gated_delta_rule(**arguments)


def test_step_refuses_a_state_of_lower_precision():
    leaves = [x.detach() for x in make(1)]
    with pytest.raises(TriScaleError, match=r"float32.*float64"):
        gated_delta_rule_step(*leaves, torch.zeros(1, 2, 8, 6))


@pytest.mark.parametrize("tokens", [40, 300])
def test_auto_may_shorten_the_chunk_but_not_change_the_result(tokens):
    leaves = make(tokens, "bounded")
    assert_same(run(leaves), run(leaves, path="chunked"), 1e-12)
    wide = make(40, "mild", keys=72)
    assert_same(run(wide, path="auto"), run(wide, path="reference"), 1e-12)
