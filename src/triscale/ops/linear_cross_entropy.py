"""Cross-entropy of a linear head without the logits of the whole batch.

The head and its gradient are worked through in pieces of tokens: only one piece of fp32 logits exists at a time, and
the gradients of hidden states and weight are formed in the forward pass while that piece is in the cache. Backward
only scales them. Same matrix products as the plain form, [N, V] never stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE_ELEMENTS = 1 << 21  # logits a piece: 8 MB in fp32, about a CPU's cache and enough rows for full speed


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The definition: ``sum_n weights[n] * (logsumexp(z_n) - z_n[targets[n]])`` with ``z = hidden @ weight.T``."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of next-token losses, in nats.

    hidden [N, d], weight [V, d], targets [N] int64 in [0, V), weights [N]. The products run in autocast's dtype if
    autocast is on, else in the inputs' dtype; softmax statistics are fp32 (fp64 for fp64 inputs).
    """
    compute = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        compute = torch.get_autocast_dtype(hidden.device.type)
    return _LinearCrossEntropy.apply(hidden, weight, targets, weights, compute)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, compute: torch.dtype) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        grads = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        narrow = weight.to(compute)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if grads else None
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if grads else None
        piece = max(16, PIECE_ELEMENTS // weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], piece):
                part = slice(start, start + piece)
                rows, target, scale = hidden[part].to(compute), targets[part, None], weights[part].to(exact)
                logits = (rows @ narrow.T).to(exact)
                top = torch.logsumexp(logits, dim=-1, keepdim=True)
                total += ((top - logits.gather(1, target)).squeeze(1) * scale).sum()
                if grad_hidden is None or grad_weight is None:
                    continue
                slope = logits.sub_(top).exp_()
                slope.scatter_add_(1, target, slope.new_full((1, 1), -1.0).expand_as(target))
                slope = slope.mul_(scale[:, None]).to(compute)
                grad_hidden[part] = (slope @ narrow).to(hidden.dtype)
                if compute == exact:
                    grad_weight.addmm_(slope.T, rows)
                else:
                    grad_weight += slope.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * upstream.to(grad_hidden.dtype),
            (grad_weight * upstream).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
