"""Decode: one or a few tokens, updating the state in place."""

from __future__ import annotations

import torch
from torch import Tensor

from triscale.config import TriScaleError

from .inputs import normalise


@torch.no_grad()
def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float | None = None
) -> Tensor:
    """Advance ``state`` [B, HV, K, V] (fp32, or fp64 for fp64 inputs) in place by T tokens and return o [B, T, HV, V].

    Shapes as in :func:`triscale.ops.gated_delta_rule`, with T usually 1. Memory does not grow: every token rewrites the
    same state. No gradient is recorded. Raises :class:`TriScaleError` for a state of another shape or dtype.
    """
    x = normalise(q, k, v, g, beta, scale, state, None)
    if state.dtype != x.dtype:
        raise TriScaleError(
            f"gated_delta_rule_step: state is {state.dtype}. Keep it in {x.dtype}: lower precision accumulates "
            "an error with every token"
        )
    qs, ks, vs, alpha, bs = (t.to(x.dtype) for t in (x.q * x.scale, x.k, x.v, x.g.to(x.dtype).exp(), x.beta))
    out = torch.empty_like(vs)
    for t in range(qs.shape[1]):
        key = ks[:, t].unsqueeze(-1)  # [B, HV, K, 1]
        state.mul_(alpha[:, t].unsqueeze(-1))
        residual = vs[:, t].unsqueeze(-2) - key.transpose(-1, -2) @ state
        state.addcmul_(key, residual * bs[:, t, :, None, None])
        out[:, t] = (qs[:, t].unsqueeze(-2) @ state).squeeze(-2)
    return out.to(v.dtype)
