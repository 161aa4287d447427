"""The operator against recorded values of the plain recurrence in fp64, for every gate regime."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from triscale.ops import gated_delta_rule

DATA = Path(__file__).parents[1] / "data" / "parity"
NAMES = ("q", "k", "v", "g", "beta")
CASES = [
    (gate, tokens, "h0") for gate in ("mild", "m1p5", "m5", "m20") for tokens in (1, 2, 15, 16, 17, 63, 64, 65, 130)
]
CASES += [(gate, tokens, "none") for gate in ("mild", "m1p5", "m5", "m20") for tokens in (17, 65)]
PRECISION = pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 3e-5)])
PATHS = pytest.mark.parametrize("path", ["reference", "chunked"])


def close(found, golden, tag, tolerance):
    for name, value in found.items():
        expected = golden[f"{tag}.{name}"]
        error = (value.double() - expected).abs().max().item()
        assert error <= tolerance * max(1.0, expected.abs().max().item()), (name, error)


def evaluate(leaves, initial, do, dht, **options):
    out, final = gated_delta_rule(*leaves, initial_state=initial, output_final_state=True, **options)
    wanted = [*leaves, initial] if initial is not None else list(leaves)
    grads = torch.autograd.grad((do * out).sum() + (dht * final).sum(), wanted)
    found = {"o": out, "ht": final, **{f"d{n}": g for n, g in zip(NAMES, grads, strict=False)}}
    if initial is not None:
        found["dh0"] = grads[-1]
    return found


@PATHS
@PRECISION
@pytest.mark.parametrize("gate, tokens, start", CASES)
def test_recorded_values(gate, tokens, start, dtype, tolerance, path):
    golden = load_file(DATA / f"kda_op_{gate}.safetensors")
    tag = f"T{tokens}.{start}"
    batch = golden[f"{tag}.o"].shape[0]
    leaves = [golden[f"in.{n}"][:batch, :tokens].to(dtype).requires_grad_() for n in NAMES]
    initial = golden["in.h0"][:batch].to(dtype).requires_grad_() if start == "h0" else None
    do, dht = golden["in.do"][:batch, :tokens].to(dtype), golden["in.dht"][:batch].to(dtype)
    close(evaluate(leaves, initial, do, dht, path=path), golden, tag, tolerance)


@PATHS
@PRECISION
@pytest.mark.parametrize(
    "gate, start", [("mild", "h0"), ("m5", "h0"), ("m5", "none"), ("mixed", "h0"), ("mixed", "none")]
)
def test_recorded_values_packed(gate, start, dtype, tolerance, path):
    golden = load_file(DATA / "kda_op_packed.safetensors")
    leaves = [golden[f"in.{gate}.{n}"].to(dtype).requires_grad_() for n in NAMES]
    initial = golden[f"in.{gate}.h0"].to(dtype).requires_grad_() if start == "h0" else None
    do, dht = golden[f"in.{gate}.do"].to(dtype), golden[f"in.{gate}.dht"].to(dtype)
    found = evaluate(leaves, initial, do, dht, path=path, cu_seqlens=golden["cu_seqlens"])
    close(found, golden, f"{gate}.{start}", tolerance)


@pytest.mark.parametrize("gate", ["m1p5", "m5", "m20"])
def test_gate_gradient_is_relatively_exact(gate):
    """Under strong decay dg is tiny (1e-8 for m20); it must not drown in the rounding of larger terms."""
    golden = load_file(DATA / f"kda_op_{gate}.safetensors")
    leaves = [golden[f"in.{n}"].clone().requires_grad_() for n in NAMES]
    initial = golden["in.h0"].clone().requires_grad_()
    found = evaluate(leaves, initial, golden["in.do"], golden["in.dht"], path="chunked")
    expected = golden["T130.h0.dg"]
    assert (found["dg"] - expected).norm() <= 1e-11 * expected.norm()
