"""The flash-linear-attention adapter: why it declines, and its arguments against the recorded signature of the kernel.

The kernel itself needs a GPU and Triton; a stand-in with the same parameters computes with our reference.
"""

import types

import pytest
import torch

from triscale.config import TriScaleError
from triscale.ops import gated_delta_rule
from triscale.ops.delta_rule import backend_report, flash_linear_attention
from triscale.ops.delta_rule.flash_linear_attention import fla_from_inputs, why_not
from triscale.ops.delta_rule.inputs import normalise


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None,
):  # fmt: skip
    """Parameters of fla.ops.kda.chunk_kda, flash-linear-attention 0.5 and 0.6 (keys before values in the state)."""
    assert not (use_qk_l2norm_in_kernel or use_gate_in_kernel or use_beta_sigmoid_in_kernel or state_v_first)
    assert all(x.is_contiguous() for x in (q, k, v, g, beta)) and g.dtype == beta.dtype == torch.float32
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    return gated_delta_rule(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, path="reference",
    )  # fmt: skip


def tensors(dtype=torch.float32, device="cpu", tokens=20):
    torch.manual_seed(0)
    shape = (1, tokens, 2, 8)
    q, k, v = (torch.randn(shape, dtype=torch.float32).to(dtype).to(device) for _ in range(3))
    return q, k, v, -torch.rand(shape).to(device), torch.rand(shape[:3]).to(dtype).to(device)


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_arguments_match_the_recorded_signature(monkeypatch, packed, scalar):
    monkeypatch.setitem(flash_linear_attention._kernels, "kda", types.SimpleNamespace(chunk_kda=chunk_kda))
    q, k, v, g, beta = tensors(torch.bfloat16)
    g = g[..., 0] if scalar else g
    cu = [0, 5, 20] if packed else None
    state = torch.randn(2 if packed else 1, 2, 8, 8)
    inputs = normalise(q, k, v, g, beta, 0.3, state, cu)
    found = fla_from_inputs(inputs, True)
    expected = gated_delta_rule(
        q, k, v, g, beta, scale=0.3, initial_state=state, cu_seqlens=cu, output_final_state=True
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-2)


def _reason(chunk_size=64, **changes):
    """The reason with tensors that claim to be on a GPU (the meta device stands in for it)."""
    inputs = normalise(*tensors(**{"device": "cpu", **changes}), None, None, None)
    fake = types.SimpleNamespace(**inputs._asdict(), dtype=inputs.dtype)
    fake.q = types.SimpleNamespace(device=torch.device("cuda"), dtype=inputs.q.dtype, shape=inputs.q.shape)
    return why_not(fake, chunk_size)


def test_it_says_why_it_declines():
    assert "CUDA" in why_not(normalise(*tensors(), None, None, None), 64)
    assert "fp64" in _reason(dtype=torch.float64)
    assert "chunk_size" in _reason(chunk_size=32)
    assert "empty" in _reason(tokens=0)
    assert _reason() is None or "cannot be imported" in _reason()


def test_a_named_path_declines_aloud_and_auto_falls_back():
    with pytest.raises(TriScaleError, match=r"flash-linear-attention declines.*CUDA"):
        gated_delta_rule(*tensors(), path="fla")
    assert torch.equal(gated_delta_rule(*tensors())[0], gated_delta_rule(*tensors(), path="chunked")[0])
    report = backend_report(torch.device("cpu"))
    assert report["gated delta rule"] == "torch, chunked" and "CUDA" in report["flash-linear-attention"]
