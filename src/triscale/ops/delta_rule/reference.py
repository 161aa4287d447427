"""The gated delta rule token by token: the definition every other path is compared with.

Per value head, with the state S in R^(K x V) (keys before values), log decay g and write strength beta:

    S' = exp(g_t)[:, None] * S_{t-1}                    decay
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T            delta write
    o_t = S_t^T (scale * q_t)                           read after the write

Kimi Linear (arXiv 2510.26692), section 3. One decay per head instead of one per channel is Gated DeltaNet; g = 0 is
the plain delta rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import CuSeqlens, Inputs, normalise


def recurrent_gated_delta_rule(
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
) -> tuple[Tensor, Tensor | None]:
    """See :func:`triscale.ops.gated_delta_rule`; one sequential step per token, differentiable by autograd."""
    inputs = normalise(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    return recurrent_from_inputs(inputs, output_final_state)


def recurrent_from_inputs(inputs: Inputs, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    dtype = inputs.dtype
    q, k, v, g, beta = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    _, tokens, heads, key_width = q.shape
    state = inputs.initial_state
    if state is None:
        state = q.new_zeros(inputs.sequences, heads, key_width, v.shape[-1])
    state = state.to(dtype)
    if inputs.offsets is None:
        spans, states = [(0, tokens)], [state]
    else:
        spans = list(zip(inputs.offsets, inputs.offsets[1:], strict=False))
        states = list(state.split(1))
    outputs, finals = [], []
    for (start, stop), s in zip(spans, states, strict=True):
        for t in range(start, stop):
            s, o = _advance(s, q[:, t] * inputs.scale, k[:, t], v[:, t], g[:, t], beta[:, t])
            outputs.append(o)
        finals.append(s)
    out = torch.stack(outputs, dim=1) if outputs else v * 1  # no token: keep the graph
    final = torch.cat(finals) if output_final_state and finals else (state if output_final_state else None)
    return out.to(inputs.v.dtype), final


def _advance(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token for a batch of heads: s [B, H, K, V], q, k, g [B, H, K], v [B, H, V], beta [B, H]."""
    s = s * g.exp().unsqueeze(-1)
    residual = v - (k.unsqueeze(-2) @ s).squeeze(-2)
    s = s + k.unsqueeze(-1) * (beta.unsqueeze(-1) * residual).unsqueeze(-2)
    return s, (q.unsqueeze(-2) @ s).squeeze(-2)
