"""Backend: flash-linear-attention's Triton kernels (`fla.ops.kda.chunk_kda`), for NVIDIA GPUs. A thin adapter: it checks
whether the kernels take an input, says why not otherwise, and maps the arguments. Nothing is imported until it is used."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .inputs import Inputs

LARGEST_KEY = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_kernels: dict[str, Any] = {}


def kernels() -> Any:
    """The module ``fla.ops.kda``; raises ImportError with the cause if it or Triton is missing."""
    if "kda" not in _kernels:
        _kernels["kda"] = import_module("fla.ops.kda")
    return _kernels["kda"]


def why_not(inputs: Inputs, chunk_size: int) -> str | None:
    """The reason these kernels cannot take the input, or None if they can."""
    if inputs.q.device.type != "cuda":
        return f"its kernels need a CUDA device, the tensors are on {inputs.q.device.type}"
    if inputs.dtype == torch.float64:
        return "its kernels have no fp64"
    if inputs.q.dtype not in DTYPES or inputs.v.dtype != inputs.q.dtype:
        return f"q and v are {inputs.q.dtype} and {inputs.v.dtype}; it takes one of bf16, fp16, fp32 for both"
    if inputs.q.shape[-1] > LARGEST_KEY:
        return f"the key width is {inputs.q.shape[-1]}, it takes at most {LARGEST_KEY}"
    if chunk_size != 64:
        return f"chunk_size is {chunk_size}, its kernel uses 64"
    if not inputs.q.shape[1] or (inputs.offsets and any(a == b for a, b in pairwise(inputs.offsets))):
        return "a sequence is empty"
    try:
        kernels()
    except Exception as error:  # Triton fails in many ways on a machine it does not support
        return f"it cannot be imported ({type(error).__name__}: {error})"
    return None


def fla_from_inputs(inputs: Inputs, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """Call the kernel: gates and beta are given after their activations, q and k after their normalisation."""
    offsets = inputs.offsets
    return kernels().chunk_kda(
        q=inputs.q.contiguous(),
        k=inputs.k.contiguous(),
        v=inputs.v.contiguous(),
        g=inputs.g.float().contiguous(),
        beta=inputs.beta.float().contiguous(),
        scale=inputs.scale,
        initial_state=None if inputs.initial_state is None else inputs.initial_state.float().contiguous(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False,
        cu_seqlens=None if offsets is None else torch.tensor(offsets, dtype=torch.int64, device=inputs.q.device),
    )
