"""SwiGLU and SiTU-GLU: values, bounds and hand-written gradients."""

import pytest
import torch
import torch.nn.functional as F

from triscale.ops.gated_activation import SituGLUActivation, SwiGLUActivation, gated

ACTIVATIONS = [SwiGLUActivation(), SituGLUActivation(), SituGLUActivation(1.5, 3.0)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    g = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(5, 4, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: gated(activation, a, b), (gate, up))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0, 1e4])
def test_backward_returns_the_value_and_stays_finite(activation, scale):
    gate, up, gradient = (scale * torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    value, d_gate, d_up = activation.backward(gate, up, gradient)
    torch.testing.assert_close(value, activation.value(gate, up))
    assert d_gate.isfinite().all() and d_up.isfinite().all()


def test_situ_is_bounded_and_close_to_swiglu_near_zero():
    x = torch.cat((torch.linspace(-1e4, 1e4, 2001), torch.linspace(-5, 5, 101)))
    gate, up = torch.meshgrid(x, x, indexing="ij")
    assert SituGLUActivation().value(gate, up).abs().max() <= 100
    small = torch.linspace(-0.05, 0.05, 41, dtype=torch.float64)
    gate, up = torch.meshgrid(small, small, indexing="ij")
    torch.testing.assert_close(SituGLUActivation().value(gate, up), F.silu(gate) * up, rtol=1e-3, atol=1e-9)
    wide = SituGLUActivation(1e9, 1e9)
    gate, up = torch.randn(2, 100, dtype=torch.float64)
    torch.testing.assert_close(wide.value(gate, up), F.silu(gate) * up)


def test_situ_is_computed_in_fp32():
    gate, up = torch.randn(2, 1000).bfloat16() * 5
    got = SituGLUActivation().value(gate, up)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, SituGLUActivation().value(gate.float(), up.float()).bfloat16())
