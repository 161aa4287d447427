"""Orthogonalisation: published goldens, the exact polar factor, and the properties every method must have."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from triscale.config import ConfigError
from triscale.ops import newton_schulz, orthogonalize
from triscale.ops.newton_schulz import METHODS, orthogonalize_reference, product_flops, why_not

DATA = Path(__file__).parents[1] / "data" / "parity" / "muon_op"
GOLDEN = load_file(DATA / "io.safetensors")
NAMES = sorted(name.removeprefix("in.") for name in GOLDEN if name.startswith("in."))
PUBLISHED = {"ns5": "jordan5", "pe5": "polar_express5"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", PUBLISHED)
def test_published_goldens(name, prefix):
    x = GOLDEN[f"in.{name}"]
    assert torch.allclose(orthogonalize(x, PUBLISHED[prefix]), GOLDEN[f"{prefix}.{name}"], rtol=0, atol=5e-5)
    exact = orthogonalize(x.double(), PUBLISHED[prefix])
    assert torch.allclose(exact, GOLDEN[f"{prefix}_f64.{name}"], rtol=0, atol=1e-10)


def test_coefficients_are_the_published_ones():
    config = json.loads((DATA / "config.json").read_text())
    assert [list(c) for c in METHODS["polar_express5"].coefficients] == config["polar_express_coefficients"]
    assert list(METHODS["jordan5"].coefficients[0]) == config["ns_coefficients"]


def matrix_with(singular_values, rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, len(singular_values), generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, len(singular_values), generator=generator, dtype=torch.float64))[0]
    return (u * torch.as_tensor(singular_values, dtype=torch.float64)) @ v.T


RANGES = {  # smallest and largest singular value on Gaussian 64 x 256, and at condition number 1e3
    "jordan5": ((0.66, 1.15), (0.19, 1.22)),
    "you5": ((0.96, 1.05), (0.20, 1.17)),
    "polar_express5": ((0.84, 1.16), (0.41, 1.16)),
    "tight4": ((0.94, 1.07), (0.12, 1.22)),
    "deepseek10": ((0.99, 1.01), (0.99, 1.01)),
}


@pytest.mark.parametrize("method", RANGES)
def test_singular_values(method):
    gaussian = torch.randn(64, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hard = matrix_with(torch.logspace(0, -3, 64), 64, 256)
    for x, (low, high) in zip((gaussian, hard), RANGES[method], strict=True):
        values = torch.linalg.svdvals(orthogonalize(x, method))
        assert low < values.min() and values.max() < high


@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].form != "aol"])
def test_keeps_the_singular_vectors(method):
    """O X^T must be symmetric positive: the polynomial acts on singular values only."""
    x = torch.randn(12, 120, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    product = orthogonalize(x, method) @ x.T
    assert torch.allclose(product, product.T, atol=1e-9)
    assert torch.linalg.eigvalsh(product).min() > 0
    assert torch.dist(orthogonalize(x, method), orthogonalize_reference(x)) < 0.35 * 12**0.5


@pytest.mark.parametrize("method", ["jordan5", "polar_express5", "turbo4", "tight4"])
@pytest.mark.parametrize("shape", [(5, 16, 24), (3, 70, 33), (4, 64, 64), (2, 3, 8, 40), (2, 520, 1030)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stack_equals_its_matrices_bit_for_bit(method, shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    stacked = orthogonalize(x, method, dtype=dtype)
    alone = torch.stack([orthogonalize(m, method, dtype=dtype) for m in x.flatten(0, -3)]).reshape(shape)
    assert torch.equal(stacked, alone)


@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].form != "aol"])
def test_transposition(method):
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(4))
    assert torch.allclose(orthogonalize(x.T, method), orthogonalize(x, method).T, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_at_any_scale(method, scale, dtype):
    if why_not(method, 8, 80, dtype, "cpu"):
        pytest.skip("declined")
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(5)) * scale
    y = orthogonalize(x, method, dtype=dtype)
    assert y.dtype == dtype and torch.isfinite(y).all()
    if scale >= 1e-3:
        assert torch.linalg.svdvals(y.float()).min() > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_input_is_never_written_to(method):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        if why_not(method, 4, 64, dtype, "cpu"):
            continue
        x = torch.randn(4, 64).to(dtype)
        before = x.clone()
        orthogonalize(x, method)
        assert torch.equal(x, before)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 24), columns=st.integers(1, 24), stack=st.integers(0, 3), seed=st.integers(0, 1000),
    rank=st.integers(1, 8),
)  # fmt: skip
def test_any_shape_and_rank(rows, columns, stack, seed, rank):
    generator = torch.Generator().manual_seed(seed)
    rank = min(rank, rows, columns)
    x = torch.randn(stack, rows, rank, generator=generator) @ torch.randn(stack, rank, columns, generator=generator)
    y = orthogonalize(x)
    assert y.shape == x.shape and torch.isfinite(y).all()
    if stack:
        assert torch.linalg.svdvals(y.double()).max() < 1.25


def test_gram_form_agrees_with_the_product_form_where_it_runs(monkeypatch):
    x = torch.randn(3, 16, 200, generator=torch.Generator().manual_seed(6))
    monkeypatch.setitem(METHODS, "product_twin", dataclasses.replace(METHODS["gram5"], form="product"))
    assert torch.allclose(orthogonalize(x, "gram5"), orthogonalize(x, "product_twin"), atol=2e-4)
    assert torch.allclose(orthogonalize(x.double(), "gram5"), orthogonalize(x.double(), "product_twin"), atol=1e-11)


@pytest.mark.parametrize("steps", [None, 3, 5])
@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (3, 24, 64), (520, 1030)])
@pytest.mark.parametrize("condition", [0, -3, -6])
def test_two_steps_at_once_equal_one_after_the_other(shape, condition, steps, monkeypatch):
    x = matrix_with(torch.logspace(0, condition, min(shape[-2:])), *shape[-2:]).expand(shape)
    paired = [orthogonalize(x.to(d), "tight4", steps) for d in (torch.float64, torch.float32, torch.bfloat16)]
    monkeypatch.setattr(newton_schulz, "PAIR_MIN_ASPECT", float("inf"))
    plain = [orthogonalize(x.to(d), "tight4", steps) for d in (torch.float64, torch.float32, torch.bfloat16)]
    assert not torch.equal(paired[1], plain[1])  # the paths do differ
    assert torch.allclose(paired[0], plain[0], atol=1e-12)
    assert torch.allclose(paired[1], plain[1], atol=2e-5)
    # bf16 rounds small singular values to noise in either form: neither may be further from orthogonal
    errors = [(torch.linalg.svdvals(y[2].double()) - 1).abs().mean() for y in (paired, plain)]
    assert abs(errors[0] - errors[1]) < 0.02


@pytest.mark.parametrize("method", ["jordan5", "tight4", "gram5"])
@pytest.mark.parametrize("shape", [(30, 300), (32, 32)])
def test_product_flops_are_those_computed(method, shape):
    if why_not(method, *shape, torch.float32, "cpu"):
        pytest.skip("declined")
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), method)
    assert counter.get_total_flops() == product_flops(*shape, method)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((16, 20), torch.float32), ((16, 200), torch.bfloat16), ((16, 200), torch.float16)]
)
def test_gram_form_declines_and_says_why(shape, dtype):
    with pytest.raises(ConfigError, match="declines"):
        orthogonalize(torch.randn(shape), "gram5", dtype=dtype)


def test_steps():
    x = torch.randn(8, 12, dtype=torch.float64)
    assert torch.equal(orthogonalize(x, "jordan5", 5), orthogonalize(x, "jordan5"))
    worse, better = ((torch.linalg.svdvals(orthogonalize(x, "polar_express8", s)) - 1).abs().max() for s in (3, 12))
    assert better < 1e-6 < worse
    for arguments in (("jordan",), ("jordan5", 0)):
        with pytest.raises(ConfigError):
            orthogonalize(x, *arguments)
    with pytest.raises(ConfigError):
        orthogonalize(torch.randn(3))
