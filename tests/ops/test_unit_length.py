"""Normalisation to unit length against autograd of its formula."""

import pytest
import torch

from triscale.ops import to_unit_length


def test_gradcheck_and_value():
    x = torch.randn(5, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.allclose(to_unit_length(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), atol=1e-14)
    assert torch.autograd.gradcheck(to_unit_length, x)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-4, 1e15])
def test_extreme_lengths_stay_finite(size):
    x = torch.full((2, 4), size).requires_grad_()
    y = to_unit_length(x)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all() and y.dtype == torch.float32


def test_low_precision_keeps_fp32_statistics():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    y = to_unit_length(x)
    y.sum().backward()
    assert y.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    assert torch.allclose(y.norm(dim=-1), torch.ones(4), atol=1e-5)
