"""Running maxima of attention logits, read by QK-Clip and by the logit sentinel.

A softmax mixer owns ``max_logits``, an fp32 buffer [heads] (-inf = never seen), and calls :func:`observe` in training
forwards while its ``record_max_logits`` is True. The maximum covers every micro-batch until someone resets it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triscale.ops.logit_maxima import fold, max_logits


@torch.no_grad()
def observe(module: nn.Module, q: Tensor, k: Tensor, scale: float, batch) -> None:
    """Fold the exact causal maxima of this forward into ``module.max_logits``.

    q: [N, H, D] or [1, N, H, D], k: [N, G, D] or [1, N, G, D] with G dividing H, both after rotation and norms; scale:
    the softmax scale; batch: a TokenBatch without cached context (``batch.lengths`` are its sequence lengths).
    """
    q, k = q.detach(), k.detach()
    q = q.squeeze(0) if q.ndim == 4 else q
    k = k.squeeze(0) if k.ndim == 4 else k
    fold(module.max_logits, max_logits(q, k, scale, lengths=batch.lengths))  # type: ignore[arg-type]
