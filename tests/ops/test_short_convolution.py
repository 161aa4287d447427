"""The short convolution against conv1d: packing, states, documents shorter than the kernel."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.config import TriScaleError
from triscale.ops import causal_short_convolution


def make(tokens, channels=5, taps=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, channels, generator=generator, dtype=dtype).requires_grad_()
    return x, torch.randn(channels, taps, generator=generator, dtype=dtype).requires_grad_()


def definition(x, weight, state):
    """One sequence [1, L, C] after its state [1, W - 1, C], by torch's own convolution."""
    padded = torch.cat([state, x], dim=1)
    if not x.shape[1]:
        return x, padded
    y = F.conv1d(padded.transpose(1, 2), weight.unsqueeze(1), groups=weight.shape[0]).transpose(1, 2)
    return y, padded[:, padded.shape[1] - weight.shape[1] + 1 :]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    taps=st.integers(1, 5),
    initial=st.booleans(),
)
def test_packed_equals_conv1d_of_each_sequence(lengths, taps, initial):
    x, weight = make(sum(lengths), taps=taps)
    state = torch.randn(len(lengths), taps - 1, 5, dtype=torch.float64) * initial
    state.requires_grad_()
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    y, final = causal_short_convolution(
        x, weight, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(offsets)
    )
    pieces = [definition(x[:, a:b], weight, state[i : i + 1])
              for i, (a, b) in enumerate(itertools.pairwise(offsets))]  # fmt: skip
    expected = torch.cat([p for p, _ in pieces], dim=1), torch.cat([f for _, f in pieces])
    wanted = (x, weight, state)
    loss = lambda y, f: y.sin().sum() + f.cos().sum()
    found = torch.autograd.grad(loss(y, final), wanted)
    exact = torch.autograd.grad(loss(*expected), wanted)
    for a, b in zip((y, final, *found), (*expected, *exact), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_gradcheck():
    x, weight = make(7)
    assert torch.autograd.gradcheck(
        lambda a, b: causal_short_convolution(a, b, cu_seqlens=[0, 2, 2, 7])[0], (x, weight)
    )


@pytest.mark.parametrize("cut", range(9))
def test_state_continues_a_sequence(cut):
    x, weight = (t.detach() for t in make(8))
    whole, end = causal_short_convolution(x, weight, output_final_state=True)
    first, state = causal_short_convolution(x[:, :cut], weight, output_final_state=True)
    rest, final = causal_short_convolution(x[:, cut:], weight, initial_state=state, output_final_state=True)
    assert torch.equal(torch.cat([first, rest], dim=1), whole) and torch.equal(final, end)


def test_low_precision_sums_in_fp32():
    x, weight = make(50, channels=16)
    y, _ = causal_short_convolution(x.bfloat16(), weight.bfloat16())
    exact, _ = causal_short_convolution(x.bfloat16().double(), weight.bfloat16().double())
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


def test_errors_name_the_shapes():
    x, weight = make(4)
    with pytest.raises(TriScaleError, match=r"\[B, T, C\] and \[C, W\]"):
        causal_short_convolution(x, weight.T)
    with pytest.raises(TriScaleError, match="initial_state"):
        causal_short_convolution(x, weight, initial_state=torch.zeros(1, 2, 5))
