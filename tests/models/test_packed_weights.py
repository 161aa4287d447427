"""The released packings: exact against a public implementation, and lossless where they can be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from published_cases import PARITY
from safetensors.torch import load_file

from triscale.models.published.packed import (
    pack_int4,
    pack_mxfp4,
    unpack_fp8_blocks,
    unpack_int4,
    unpack_mxfp4,
)

IO = load_file(PARITY / "packed_weights" / "io.safetensors")


def test_unpacking_is_exact():
    assert torch.equal(unpack_mxfp4(IO["mxfp4.weight_packed"], IO["mxfp4.weight_scale"]), IO["mxfp4.weight"])
    parts = (IO[f"int4.weight_{name}"] for name in ("packed", "scale", "shape"))
    assert torch.equal(unpack_int4(*parts), IO["int4.weight"])


def test_packing_is_exact_with_given_scales():
    packed, scale = pack_mxfp4(IO["pack.weight"], IO["pack.scale"])
    assert torch.equal(packed, IO["pack.mxfp4_packed"]) and torch.equal(scale, IO["pack.mxfp4_scale"])
    packed, _, shape = pack_int4(IO["pack.weight"], IO["pack.scale"])
    assert torch.equal(packed, IO["pack.int4_packed"]) and shape.tolist() == list(IO["pack.weight"].shape)


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 3))
def test_packing_what_was_unpacked_changes_no_value(seed, rows, groups):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, 16 * groups), generator=generator, dtype=torch.uint8)
    codes[torch.rand(rows, 16 * groups, generator=generator) < 0.5] &= 0x11  # groups of small values too
    scale = torch.randint(100, 140, (rows, groups), generator=generator, dtype=torch.uint8)
    values = unpack_mxfp4(codes, scale)
    assert torch.equal(unpack_mxfp4(*pack_mxfp4(values)), values)


@given(st.integers(0, 2**31), st.floats(1e-6, 1e4))
def test_packing_errors_stay_within_half_a_step(seed, size):
    weight = torch.randn(4, 96, generator=torch.Generator().manual_seed(seed)) * size
    groups = weight.view(4, 3, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    # E2M1: the widest gap is 2 of 6 units, and beyond 6 units values saturate (up to a quarter of the largest)
    error = (unpack_mxfp4(*pack_mxfp4(weight), dtype=torch.float32).view(4, 3, 32) - groups).abs()
    assert (error <= largest * 0.251).all()
    error = (unpack_int4(*pack_int4(weight), dtype=torch.float32).view(4, 3, 32) - groups).abs()
    # half a step, and the rounding of the bf16 scale and of the bf16 product at code 7
    assert (error <= largest / 7.5 * 0.56).all()


def test_scales_that_are_not_numbers_stay_so():
    value = unpack_mxfp4(torch.full((1, 16), 0x22, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8))
    assert value.isnan().all()
    zero = torch.zeros(1, 32)
    assert torch.equal(unpack_mxfp4(*pack_mxfp4(zero)), zero.bfloat16())
    assert torch.equal(unpack_int4(*pack_int4(zero)), zero.bfloat16())


def test_fp8_blocks_scale_their_own_part():
    weight = torch.ones(130, 200).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    value = unpack_fp8_blocks(weight, scale, torch.float32)
    assert value[0, 0] == 1 and value[0, 199] == 2 and value[129, 0] == 3 and value[129, 128] == 4


@pytest.mark.parametrize("columns", [31, 33])
def test_shapes_that_do_not_fit_are_refused(columns):
    with pytest.raises(ValueError, match="groups of 32"):
        pack_mxfp4(torch.zeros(2, columns))
    with pytest.raises(ValueError, match="weight_scale"):
        unpack_mxfp4(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="weight_scale"):
        unpack_int4(torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 1), torch.tensor([2, 64]))
