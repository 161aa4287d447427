"""The decoder: embedding, layers made of swappable parts, final norm, head.

Where each part is defined: mixers, feed-forward layers and residual connections are listed by kind in
:mod:`triscale.nn.parts` (``MIXERS``, ``FEED_FORWARDS``, ``RESIDUALS``), each kind pointing at its file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from triscale.config import Role, part
from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.initialize import initialize
from triscale.nn.norm import RMSNorm
from triscale.nn.parts import FEED_FORWARDS, MIXERS, RESIDUALS
from triscale.nn.residual import StandardResidual, link_depth
from triscale.ops.linear_cross_entropy import linear_cross_entropy

from .cache import DecoderCache, LayerCache
from .multi_token import MultiTokenPrediction

Output = Literal["loss", "token_losses", "logits", "last_logits", "hidden"]


class DecoderLayer(nn.Module):
    """One mixer and one feed-forward layer, each behind a norm and a residual connection.

    Every use of the layer's own parameters happens inside ``forward``, so that sharding can wrap a layer.
    """

    def __init__(self, config: Decoder.Config, context: BuildContext):
        super().__init__()
        dense = context.layer < config.first_dense and config.dense_feed_forward is not None
        feed_forward = config.dense_feed_forward if dense else config.feed_forward
        self.mixer_norm = RMSNorm(context.width, context.norm_eps, **context.factory)
        self.mixer: Any = config.mixer.build(context)
        self.mixer_residual: Any = config.residual.build(context, sublayer=2 * context.layer)
        self.feed_forward_norm = RMSNorm(context.width, context.norm_eps, **context.factory)
        self.feed_forward: Any = feed_forward.build(context)
        self.feed_forward_residual: Any = config.residual.build(context, sublayer=2 * context.layer + 1)

    def forward(self, state: Any, batch: TokenBatch, cache: LayerCache | None = None) -> Any:
        """Depth state in, depth state out; its form is the residual connection's own business."""
        x = self.mixer_residual.read(state, self.mixer_norm)
        state = self.mixer_residual.write(state, self.mixer(x, batch, cache))
        x = self.feed_forward_residual.read(state, self.feed_forward_norm)
        return self.feed_forward_residual.write(state, self.feed_forward(x, batch))


class Decoder(nn.Module):
    """A causal language model over flat packed tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """width: hidden size. depth: layers. vocabulary: set from the tokenizer when left out.

        first_dense: number of first layers that use ``dense_feed_forward`` (mixtures of experts keep one dense).
        checkpoint_activations: recompute each layer in backward, for less memory and about a third more time.
        multi_token: an extra layer and objective that predict one token further (training only); left out = none.
        """

        width: int = 256
        depth: int = 4
        vocabulary: int | None = None
        mixer: Any = part(MIXERS, "grouped_query_attention")
        feed_forward: Any = part(FEED_FORWARDS, "swiglu")
        residual: Any = part(RESIDUALS, "standard")
        first_dense: int = 0
        dense_feed_forward: Any = part(FEED_FORWARDS, "swiglu")
        tied_head: bool = True
        norm_eps: float = 1e-5
        checkpoint_activations: bool = False
        multi_token: MultiTokenPrediction.Config | None = None

        def __post_init__(self) -> None:
            for name in ("width", "depth"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")

        def build(
            self,
            *,
            seed: int | None = 0,
            dtype: torch.dtype | None = None,
            device: torch.device | str | None = None,
        ) -> Decoder:
            """Build and initialise; ``seed=None`` or the meta device leaves the parameters unset."""
            if self.vocabulary is None:
                raise ValueError("vocabulary: not set; give the tokenizer's size")
            model = Decoder(self, dtype=dtype, device=device)
            if seed is not None and str(device) != "meta":
                initialize(model, seed)
            return model

    def __init__(self, config: Config, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None):
        super().__init__()
        self.config = config
        context = BuildContext(
            width=config.width, depth=config.depth, norm_eps=config.norm_eps, dtype=dtype, device=device
        )
        self.embedding = nn.Embedding(config.vocabulary or 0, config.width, **context.factory)
        self.start = config.residual.build_start()
        self.layers = nn.ModuleList(DecoderLayer(config, context.at(layer)) for layer in range(config.depth))
        self.output_residual = config.residual.build_output(context)
        self.norm = RMSNorm(config.width, config.norm_eps, **context.factory)
        self.head = nn.Linear(config.width, config.vocabulary or 0, bias=False, **context.factory)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        self.multi_token: MultiTokenPrediction | None = None
        if config.multi_token is not None:
            plain = replace(config, residual=StandardResidual.Config(), first_dense=0)
            layer = DecoderLayer(plain, context.at(config.depth - 1))
            self.multi_token = MultiTokenPrediction(config.multi_token, layer, context)
        connections = [c for layer in self._layers() for c in (layer.mixer_residual, layer.feed_forward_residual)]
        link_depth(connections, self.output_residual)
        self._keep_parameter_dtypes()

    def _layers(self) -> list[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _keep_parameter_dtypes(self) -> None:
        """Parameters whose role names a dtype keep it whatever dtype the model is built in."""
        for module in self.modules():
            declare = getattr(module, "parameter_roles", None)
            for name, role in (declare() if declare else {}).items():
                if role.dtype is not None:
                    parameter = module.get_parameter(name)
                    parameter.data = parameter.data.to(getattr(torch, role.dtype))

    def forward(
        self, batch: TokenBatch | Tensor, cache: DecoderCache | None = None, output: Output | None = None
    ) -> Tensor:
        """Run the model.

        ``batch`` may be token ids [B, T]; the result is then logits [B, T, V]. For a :class:`TokenBatch`, output is
        "loss" (weighted sum of nats; default when it has targets), "token_losses" [N], "logits" [N, V] in fp32
        (default otherwise), "last_logits" [S, V] of each sequence's last token, or "hidden" [N, width].
        """
        if isinstance(batch, Tensor):
            rows, length = batch.shape
            return self(TokenBatch.from_rows(batch), cache, "logits").view(rows, length, -1)
        if output is None:
            output = "loss" if batch.targets is not None else "logits"
        h = self._hidden(batch, cache)[0]
        if output == "hidden":
            return h
        if output == "last_logits":
            return self.head(h[batch.cu_seqlens[1:].long() - 1]).float()
        if output == "logits":
            return self.head(h).to(torch.promote_types(h.dtype, torch.float32))
        if batch.targets is None or batch.loss_weights is None:
            raise ValueError(f"output={output!r} needs a batch with targets and loss_weights")
        if output == "loss":
            loss = linear_cross_entropy(h, self.head.weight, batch.targets, batch.loss_weights)
            if self.multi_token is not None and self.training and torch.is_grad_enabled():
                further = self.multi_token.loss(h[None], batch, self.embedding, self.head.weight)
                loss = loss + self.multi_token.weight * (further - further.detach())  # a gradient, no change of value
            return loss
        return torch.cat(
            [
                F.cross_entropy(self.head(piece).float(), target, reduction="none")
                for piece, target in zip(h.split(1024), batch.targets.split(1024), strict=True)
            ]
        )

    def _hidden(self, batch: TokenBatch, cache: DecoderCache | None) -> Tensor:
        state = self.start(self.embedding(batch.tokens))
        for index, layer in enumerate(self.layers):
            layer_cache = cache.layers[index] if cache is not None else None
            if self.config.checkpoint_activations and self.training and torch.is_grad_enabled():
                state = checkpoint(layer, state, batch, layer_cache, use_reentrant=False)
            else:
                state = layer(state, batch, layer_cache)
        return self.output_residual.read(state, self.norm)

    def new_cache(self, slots: int, capacity: int) -> DecoderCache:
        """An empty cache for ``slots`` sequences of up to ``capacity`` tokens."""
        weight = self.embedding.weight
        specs = [layer.mixer.cache_spec() for layer in self._layers()]
        layers = [LayerCache(spec, slots, capacity, weight.dtype, weight.device) for spec in specs]
        return DecoderCache(layers, [0] * slots)

    def parameter_roles(self) -> dict[str, Role]:
        roles = {"embedding.weight": Role(kind="embedding")}
        if not self.config.tied_head:
            roles["head.weight"] = Role(kind="head")
        return roles

    def flops_per_token(self, context_length: int) -> int:
        """Forward FLOPs a token at a training length, head included, embedding look-up not. Training costs 3 times."""
        flops = 2 * self.config.width * self.head.weight.shape[0]
        for layer in self._layers():
            flops += layer.mixer.flops_per_token(context_length) + layer.feed_forward.flops_per_token()
            for connection in (layer.mixer_residual, layer.feed_forward_residual):
                flops += connection.flops_per_token()
        if self.multi_token is not None:
            flops += self.multi_token.flops_per_token(context_length) + 2 * self.head.weight.numel()
        return flops + self.output_residual.flops_per_token()
