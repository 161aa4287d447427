"""Running maxima of attention logits, read by QK-Clip and by the logit sentinel.

A softmax mixer owns ``max_logits``, an fp32 buffer [heads] (-inf = never seen), and calls :func:`observe` in training
forwards while its ``record_max_logits`` is True. The maximum covers every micro-batch until someone resets it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triscale.ops.logit_maxima import max_logits


@torch.no_grad()
def observe(module: nn.Module, q: Tensor, k: Tensor, scale: float, batch) -> None:
    """Fold the exact causal maxima of this forward into ``module.max_logits``.

    q: [N, H, D] or [1, N, H, D], k: [N, G, D] or [1, N, G, D] with G dividing H, both after rotation and norms; scale:
    the softmax scale; batch: a TokenBatch without cached context (``batch.lengths`` are its sequence lengths).
    """
    q, k = q.detach(), k.detach()
    q = q.squeeze(0) if q.ndim == 4 else q
    k = k.squeeze(0) if k.ndim == 4 else k
    record(module, max_logits(q, k, scale, lengths=batch.lengths))


@torch.no_grad()
def record(module: nn.Module, maxima: Tensor) -> None:
    """Fold maxima of any shape [..., H, L] reduced elsewhere, or [H], into ``module.max_logits``.

    For kernels that return row maxima themselves, such as FlexAttention's ``max_scores`` [B, H, L].
    """
    buffer: Tensor = module.max_logits  # type: ignore[assignment]
    if maxima.ndim > 1:
        maxima = maxima.detach().transpose(0, -2).flatten(1).amax(1)
    # in place: the buffer's address must survive for readers, and NaN is kept so that nobody clips by it
    buffer.copy_(torch.maximum(buffer, maxima.to(buffer)))
