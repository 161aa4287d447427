"""One entry for all paths. ``auto`` takes the fastest path that can take the input; a named path declines aloud."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from triscale.config import TriScaleError

from .chunked import chunked_from_inputs
from .flash_linear_attention import fla_from_inputs, why_not
from .inputs import CuSeqlens, Inputs, normalise
from .reference import recurrent_from_inputs

Path = Literal["auto", "reference", "chunked", "fla"]
CHUNK_SIZES = (16, 32, 64, 128)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: CuSeqlens = None,
    chunk_size: int = 64,
    path: Path = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule with one decay per key channel (Kimi Delta Attention) or per head (Gated DeltaNet).

    q, k: [B, T, H, K]; v: [B, T, HV, V] with HV a multiple of H (value head i uses query/key head i // (HV / H));
    g: log decay [B, T, HV, K] or [B, T, HV]; beta: [B, T, HV], after the sigmoid. ``scale`` multiplies q and
    defaults to K**-0.5; q and k are taken as they are (normalise them before). ``initial_state``: [B, HV, K, V], or
    [N, HV, K, V] with ``cu_seqlens`` (cumulative lengths of N sequences packed in one row, B = 1).

    Returns ``(o, final_state)``: o [B, T, HV, V] in v's dtype, final_state like ``initial_state`` in fp32 (fp64 for
    fp64 inputs), or None unless ``output_final_state``. Gates, sums and state are kept in fp32 (fp64) throughout.
    Any g is exact, forward and backward, minus infinity included. ``chunk_size`` only moves rounding and speed; "auto"
    may shorten it, "chunked" takes it as it is.

    ``path``: "chunked" (matrix products, any device), "reference" (token by token), "fla" (flash-linear-attention's
    kernels on a GPU) or "auto". Raises :class:`TriScaleError` for inconsistent shapes and for a named path that
    cannot take the input. Source: arXiv 2510.26692, section 3.
    """
    if chunk_size not in CHUNK_SIZES:
        raise TriScaleError(f"gated_delta_rule: chunk_size is {chunk_size}. Use one of {CHUNK_SIZES}")
    inputs = normalise(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    with torch.autocast(q.device.type, enabled=False):  # the inputs' dtypes decide, not the surroundings
        if path == "reference":
            return recurrent_from_inputs(inputs, output_final_state)
        if path == "chunked":
            return chunked_from_inputs(inputs, chunk_size, output_final_state)
        if path not in ("auto", "fla"):
            raise TriScaleError(f"gated_delta_rule: path is {path!r}. Use auto, reference, chunked or fla")
        reason = why_not(inputs, chunk_size)
        if reason is None:
            return fla_from_inputs(inputs, output_final_state)
        if path == "fla":
            raise TriScaleError(f"gated_delta_rule: flash-linear-attention declines: {reason}. Use path='auto'")
        return chunked_from_inputs(inputs, _preferred_chunk(inputs, chunk_size), output_final_state)


def _preferred_chunk(inputs: Inputs, chunk_size: int) -> int:
    """On a CPU, heads up to 64 wide run faster in chunks of 32: less work inside a chunk, and gates span less of it."""
    narrow = max(inputs.q.shape[-1], inputs.v.shape[-1]) <= 64
    return min(chunk_size, 32) if narrow and inputs.q.device.type == "cpu" else chunk_size
