"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): one more layer that predicts one token further.

For position i it joins the model's hidden state h_i with the embedding of the *next* token and predicts the token after::

    x_i = eh_proj [ enorm(embedding(t_{i+1})) ; hnorm(h_i) ]        logits for t_{i+2} = head(norm(layer(x)_i))

Embedding and head are the model's own. In training the loss joins the gradient with a weight and leaves the reported
loss alone; evaluation never runs it. Afterwards the layer can draft: :meth:`MultiTokenPrediction.draft_logits`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triscale.config import Role
from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.norm import RMSNorm
from triscale.ops.linear_cross_entropy import linear_cross_entropy

from .cache import LayerCache


class MultiTokenPrediction(nn.Module):
    """Predicts t_{i+2} from h_i and t_{i+1}; ``layer`` is one decoder layer with a plain residual connection."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """weight: factor of the extra loss (DeepSeek-V3: 0.3, later 0.1)."""

        weight: float = 0.3

        def __post_init__(self) -> None:
            if self.weight <= 0:
                raise ValueError(f"weight: {self.weight} must be positive; leave multi_token out to go without")

    def __init__(self, config: Config, layer: nn.Module, context: BuildContext):
        super().__init__()
        self.weight = config.weight
        self.enorm = RMSNorm(context.width, context.norm_eps, **context.factory)
        self.hnorm = RMSNorm(context.width, context.norm_eps, **context.factory)
        self.eh_proj = nn.Linear(2 * context.width, context.width, bias=False, **context.factory)
        self.layer: Any = layer
        self.norm = RMSNorm(context.width, context.norm_eps, **context.factory)

    def forward(
        self, hidden: Tensor, batch: TokenBatch, embedding: Callable[[Tensor], Tensor], cache: LayerCache | None = None
    ) -> Tensor:
        """hidden [1, N, width] of positions i; ``batch.tokens`` hold t_{i+1}. Returns [1, N, width] for the head."""
        joined = torch.cat((self.enorm(embedding(batch.tokens)), self.hnorm(hidden)), dim=-1)
        return self.norm(self.layer(self.eh_proj(joined), batch, cache))

    def loss(self, hidden: Tensor, batch: TokenBatch, embedding: Callable[[Tensor], Tensor], head: Tensor) -> Tensor:
        """Weighted sum of nats over every position that has a token two ahead; hidden [1, N, width]."""
        previous, index = _positions(batch)
        assert batch.targets is not None and batch.loss_weights is not None
        shifted = TokenBatch.from_lengths(
            batch.tokens[0, index], [max(length - 1, 0) for length in batch.lengths if length]
        ).to(hidden.device)
        shifted.memo |= {
            key: value for key, value in batch.memo.items() if key == "loss_scale"
        }  # auxiliary losses' too
        out = self(hidden[:, previous], shifted, embedding)[0]
        return linear_cross_entropy(out, head, batch.targets[index], batch.loss_weights[index])

    def draft_logits(
        self, hidden: Tensor, batch: TokenBatch, embedding: Callable[[Tensor], Tensor], head: Tensor, cache: LayerCache
    ) -> Tensor:
        """Logits [N, V] for the token after ``batch.tokens``, given the hidden states that predicted those tokens.

        The batch's positions and context lengths count this layer's own cache (:meth:`new_cache`).
        """
        return self(hidden, batch, embedding, cache)[0] @ head.mT

    def new_cache(self, slots: int, capacity: int) -> LayerCache:
        weight = self.eh_proj.weight
        return LayerCache(self.layer.mixer.cache_spec(), slots, capacity, weight.dtype, weight.device)

    def parameter_roles(self) -> dict[str, Role]:
        return {"eh_proj.weight": Role(kind="matrix")}

    def flops_per_token(self, context_length: int) -> int:
        """Forward FLOPs a token at a training length, the model's head not counted."""
        layer = self.layer.mixer.flops_per_token(context_length) + self.layer.feed_forward.flops_per_token()
        return layer + 2 * self.eh_proj.weight.numel()


def _positions(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Flat indices (i, i + 1) of all neighbouring pairs inside sequences, in order."""
    first = torch.zeros(batch.count + 1, dtype=torch.bool, device=batch.tokens.device)
    first[batch.cu_seqlens.long()] = True  # the entry past the end is dropped
    index = (~first[:-1]).nonzero().squeeze(-1)
    return index - 1, index
