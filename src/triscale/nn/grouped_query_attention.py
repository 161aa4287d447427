"""Grouped-query attention (Ainslie et al. 2023) with rotary positions: the ladder's baseline mixer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triscale.config import Role
from triscale.config.roles import grouped_query_clip
from triscale.ops.attention import cached_attention, segmented_attention
from triscale.ops.rotary import apply_rotary, rotary_tables

from .batch import TokenBatch
from .cache_spec import CacheSpec
from .context import BuildContext
from .norm import RMSNorm


class GroupedQueryAttention(nn.Module):
    """Causal softmax attention; ``heads`` queries share ``kv_heads`` keys and values."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """kv_heads None = heads (multi-head attention). head_dim None = width / heads. rope_theta 0 = no rotation."""

        heads: int = 4
        kv_heads: int | None = None
        head_dim: int | None = None
        rope_theta: float = 10000.0
        qk_norm: bool = False

        def __post_init__(self) -> None:
            groups = self.kv_heads or self.heads
            if self.heads < 1 or self.heads % groups:
                raise ValueError(f"kv_heads: {groups} must divide heads ({self.heads})")
            if self.head_dim is not None and (self.head_dim < 1 or (self.rope_theta and self.head_dim % 2)):
                raise ValueError(f"head_dim: {self.head_dim} must be positive, and even for rotary positions")

        def build(self, context: BuildContext) -> GroupedQueryAttention:
            if self.head_dim is None and context.width % self.heads:
                raise ValueError(f"heads: {self.heads} does not divide the width {context.width}; set head_dim")
            return GroupedQueryAttention(self, context)

    def __init__(self, config: Config, context: BuildContext):
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.head_dim or context.width // config.heads
        self.rope_theta, self.scale, self.width = config.rope_theta, self.head_dim**-0.5, context.width
        self.q_proj = nn.Linear(context.width, self.heads * self.head_dim, bias=False, **context.factory)
        self.k_proj = nn.Linear(context.width, self.kv_heads * self.head_dim, bias=False, **context.factory)
        self.v_proj = nn.Linear(context.width, self.kv_heads * self.head_dim, bias=False, **context.factory)
        self.o_proj = nn.Linear(self.heads * self.head_dim, context.width, bias=False, **context.factory)
        self.q_norm = RMSNorm(self.head_dim, context.norm_eps, **context.factory) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, context.norm_eps, **context.factory) if config.qk_norm else None
        self.record_max_logits = False
        maxima = torch.full((self.heads,), -torch.inf, dtype=torch.float32, device=context.device)
        self.register_buffer("max_logits", maxima, persistent=False)

    def forward(self, x: Tensor, batch: TokenBatch, cache=None) -> Tensor:
        """x [1, N, width] -> [1, N, width]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta:
            cos, sin = self._tables(batch)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if self.record_max_logits and self.training:
            from .logit_probe import observe

            observe(self, q, k, self.scale, batch)
        if cache is None:
            o = segmented_attention(q, k, v, batch, self.scale)
        else:
            cache.append(batch, k=k[0], v=v[0])
            every = range(len(batch.lengths))
            keys, values = [cache.read("k", s) for s in every], [cache.read("v", s) for s in every]
            o = cached_attention(q, keys, values, batch.lengths, self.scale)
        return self.o_proj(o.flatten(-2))

    def _tables(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        key = ("rotary", self.head_dim, self.rope_theta)
        if key not in batch.memo:
            batch.memo[key] = rotary_tables(batch.positions, self.head_dim, self.rope_theta)
        return batch.memo[key]

    def cache_spec(self) -> CacheSpec:
        shape = (self.kv_heads, self.head_dim)
        return CacheSpec(per_token={"k": (shape, None), "v": (shape, None)})

    def parameter_roles(self) -> dict[str, Role]:
        # normalised queries and keys do not grow with their projections: clipping those would shrink them for nothing
        queries, keys = ((), ()) if self.q_norm else grouped_query_clip(self.heads, self.kv_heads, self.head_dim)
        per_head = lambda heads: (self.head_dim,) * heads
        return {
            "q_proj.weight": Role(kind="matrix", head_blocks=per_head(self.heads), clip=queries),
            "k_proj.weight": Role(kind="matrix", head_blocks=per_head(self.kv_heads), clip=keys),
            "v_proj.weight": Role(kind="matrix", head_blocks=per_head(self.kv_heads)),
            "o_proj.weight": Role(kind="matrix"),
        }

    def flops_per_token(self, context_length: int) -> int:
        """Forward FLOPs a token at a training length: the causal half of the score matrix is counted."""
        projections = 2 * self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return projections + 2 * self.heads * self.head_dim * (context_length + 1)
