"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), as Kimi K2, Kimi Linear and K3 use it.

Keys and values of all heads are expanded from one latent per token, and only that latent is cached::

    q         = q_proj x               or  q_b_proj RMSNorm(q_a_proj x)     per head: nope | rope
    [c | k_r] = kv_a_proj_with_mqa x                                        one latent and ONE shared key per token
    [k | v]   = kv_b_proj RMSNorm(c)                                        per head
    o         = softmax((q_nope . k + q_rope . k_r) / sqrt(nope + rope)) v
    y         = o_proj o               or  o_proj (sigmoid(g_proj x) * o)   (gated, Kimi K3)

Two forms that agree. *Expanded*: per-head keys and values are materialised (training, prefill). *Absorbed*:
``q_nope . (W_k c) = (W_k^T q_nope) . c``, so scores and the weighted sum are taken on the latents themselves and the
cache is never expanded (decode).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from triscale.config import ClipRows, Role
from triscale.ops.attention import cached_attention, segmented_attention
from triscale.ops.rotary import apply_rotary
from triscale.ops.yarn import Yarn, rotary_frequencies

from .batch import TokenBatch
from .cache_spec import CacheSpec
from .context import BuildContext
from .norm import RMSNorm

# The latent norms of every published model keep this epsilon, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Causal softmax attention over a shared low-rank latent; [1, N, width] -> [1, N, width]."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Dimensions carry the publishers' names.

        q_lora_rank: None = full-rank queries. kv_lora_rank: width of the cached latent; None = width / 4, at least 16.
        qk_nope_head_dim, v_head_dim: None = width / heads. qk_rope_head_dim: None = half of qk_nope_head_dim (even), as
        published; shared key dims, rotated only if ``rope_theta`` is not 0 (0 = no positional encoding; the dims
        still exist, as in Kimi Linear). yarn: context extension, with rope_theta only. output_gate: K3's sigmoid gate.
        """

        heads: int = 4
        q_lora_rank: int | None = None
        kv_lora_rank: int | None = None
        qk_nope_head_dim: int | None = None
        qk_rope_head_dim: int | None = None
        v_head_dim: int | None = None
        rope_theta: float = 0.0
        yarn: Yarn | None = None
        output_gate: bool = False

        def __post_init__(self) -> None:
            for name in ("heads", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ValueError(f"{name}: {value} must be at least 1, or left out")
            rope = self.qk_rope_head_dim
            if rope is not None and (rope < 0 or (self.rope_theta and rope % 2)):
                raise ValueError(f"qk_rope_head_dim: {rope} must not be negative, and even to rotate")
            if self.yarn is not None and not self.rope_theta:
                raise ValueError("yarn: has no effect without rope_theta; set rope_theta or remove yarn")

        def resolved(self, width: int) -> LatentAttention.Config:
            """The same with every dimension that was left out filled in for a model of ``width``."""
            head = max(width // self.heads, 1)
            nope = self.qk_nope_head_dim or head
            rope = max(nope // 4 * 2, 2) if self.qk_rope_head_dim is None else self.qk_rope_head_dim
            return replace(
                self,
                kv_lora_rank=self.kv_lora_rank or max(width // 4, 16),
                qk_nope_head_dim=nope,
                qk_rope_head_dim=rope,
                v_head_dim=self.v_head_dim or head,
            )

        def build(self, context: BuildContext) -> LatentAttention:
            return LatentAttention(self, context)

    def __init__(self, config: Config, context: BuildContext):
        super().__init__()
        self.config, self.width, self.heads = config, context.width, config.heads
        full = config.resolved(context.width)
        assert full.qk_nope_head_dim and full.v_head_dim and full.kv_lora_rank and full.qk_rope_head_dim is not None
        self.nope, self.rope, self.value = full.qk_nope_head_dim, full.qk_rope_head_dim, full.v_head_dim
        self.latent = full.kv_lora_rank
        self.scale = (self.nope + self.rope) ** -0.5 * (config.yarn.softmax_factor if config.yarn else 1.0)
        q_width, o_width, rank = self.heads * (self.nope + self.rope), self.heads * self.value, config.q_lora_rank

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, **context.factory)

        if rank is None:
            self.q_proj = linear(self.width, q_width)
        else:
            self.q_a_proj = linear(self.width, rank)
            self.q_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS, **context.factory)
            self.q_b_proj = linear(rank, q_width)
        self.kv_a_proj_with_mqa = linear(self.width, self.latent + self.rope)
        self.kv_a_layernorm = RMSNorm(self.latent, LATENT_NORM_EPS, **context.factory)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.g_proj = linear(self.width, o_width) if config.output_gate else None
        self.o_proj = linear(o_width, self.width)
        self.record_max_logits = False
        maxima = torch.full((self.heads,), -torch.inf, dtype=torch.float32, device=context.device)
        self.register_buffer("max_logits", maxima, persistent=False)

    def forward(self, x: Tensor, batch: TokenBatch, cache=None) -> Tensor:
        q, latent, shared_key = self._project(x, batch)
        if cache is None:
            o = self._expanded(q, latent, shared_key, batch)
        else:
            cache.append(batch, latent=latent[0], shared_key=shared_key[0])
            fresh = not any(batch.context_lengths) and max(batch.lengths, default=0) > 1
            o = self._expanded(q, latent, shared_key, batch) if fresh else self._from_cache(q, batch, cache)
        o = o.flatten(-2)
        if self.g_proj is not None:
            o = (o * torch.sigmoid(_at_least_fp32(self.g_proj(x)))).to(x.dtype)
        return self.o_proj(o)

    def _project(self, x: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [1, N, H, nope + rope], normed latents [1, N, latent], shared keys [1, N, rope] (both rotated)."""
        q = self.q_proj(x) if self.config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.heads, self.nope + self.rope))
        latent, shared_key = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), dim=-1)
        if self.config.rope_theta:
            tables = self._tables(batch)
            q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
            q = torch.cat((q_nope, _rotate_pairs(q_rope, *tables)), dim=-1)
            shared_key = _rotate_pairs(shared_key.unsqueeze(-2), *tables).squeeze(-2)
        return q, self.kv_a_layernorm(latent), shared_key

    def _expanded(self, q: Tensor, latent: Tensor, shared_key: Tensor, batch: TokenBatch) -> Tensor:
        k, v = self._expand(latent, shared_key)
        if self.record_max_logits and self.training:
            from .logit_probe import observe

            observe(self, q, k, self.scale, batch)
        return segmented_attention(q, k, v, batch, self.scale)

    def _expand(self, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """Per-head keys [..., H, nope + rope] and values [..., H, value] from latents [..., latent]."""
        heads = self.kv_b_proj(latent).unflatten(-1, (self.heads, self.nope + self.value))
        k, v = heads.split((self.nope, self.value), dim=-1)
        shared = shared_key.unsqueeze(-2).expand(*shared_key.shape[:-1], self.heads, self.rope)
        return torch.cat((k, shared), dim=-1), v

    def _from_cache(self, q: Tensor, batch: TokenBatch, cache) -> Tensor:
        """Attention of new tokens to their context, per sequence in the form that costs less."""
        outputs, start = [], 0
        for index, length in enumerate(batch.lengths):
            new = q[:, start : start + length]
            latent, shared_key = cache.read("latent", index), cache.read("shared_key", index)
            start += length
            if length == 0:
                continue
            if self._absorbing_is_cheaper(length, latent.shape[0]):
                outputs.append(self._absorbed(new[0], latent, shared_key)[None])
            else:
                k, v = self._expand(latent, shared_key)
                outputs.append(cached_attention(new, [k], [v], [length], self.scale))
        return torch.cat(outputs, dim=1) if outputs else q.new_zeros(1, 0, self.heads, self.value)

    def _absorbing_is_cheaper(self, new: int, context: int) -> bool:
        """Multiply-adds per head; ``context`` includes the new tokens."""
        both = self.nope + self.value
        absorbed = new * context * (2 * self.latent + self.rope) + new * self.latent * both
        return absorbed <= new * context * (both + self.rope) + context * self.latent * both

    def _absorbed(self, q: Tensor, latent: Tensor, shared_key: Tensor) -> Tensor:
        """q [t, H, nope + rope], latent [C, latent], shared_key [C, rope]; the t new tokens end the context."""
        new, context = q.shape[0], latent.shape[0]
        w_k, w_v = self.kv_b_proj.weight.view(self.heads, -1, self.latent).split((self.nope, self.value), dim=1)
        q_nope, q_rope = q.transpose(0, 1).split((self.nope, self.rope), dim=-1)  # [H, t, .]
        queries = torch.cat((q_nope @ w_k, q_rope), dim=-1)
        scores = _at_least_fp32(queries @ torch.cat((latent, shared_key), dim=-1).mT) * self.scale
        if new > 1:
            later = torch.ones(new, context, dtype=torch.bool, device=q.device).triu(context - new + 1)
            scores = scores.masked_fill(later, -torch.inf)
        weights = torch.softmax(scores, dim=-1).to(latent.dtype)  # [H, t, C]
        return ((weights @ latent) @ w_v.mT).transpose(0, 1)

    def _tables(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, rope / 2] of this batch, shared by all layers through the batch."""
        key = ("latent_rotary", self.rope, self.config.rope_theta, self.config.yarn)
        if key not in batch.memo:
            frequencies = rotary_frequencies(self.rope, self.config.rope_theta, self.config.yarn)
            angles = (batch.positions.float()[:, None] * frequencies.to(batch.positions.device))[:, None]
            factor = self.config.yarn.rotation_factor if self.config.yarn else 1.0
            batch.memo[key] = (angles.cos() * factor, angles.sin() * factor)
        return batch.memo[key]

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(per_token={"latent": ((self.latent,), None), "shared_key": ((self.rope,), None)})

    def parameter_roles(self) -> dict[str, Role]:
        """QK-Clip (Kimi K2, arXiv 2507.20534, algorithm 1): both halves of a head's nope product share the factor, its
        rotary query takes all of it, and the shared key, which other heads read too, is left alone."""
        q_dim, kv_dim, matrix = self.nope + self.rope, self.nope + self.value, Role(kind="matrix")
        q_clip, k_clip = [], []
        for head in range(self.heads):
            q, kv = head * q_dim, head * kv_dim
            q_clip.append(ClipRows(head, q, q + self.nope, 0.5))
            if self.rope:
                q_clip.append(ClipRows(head, q + self.nope, q + q_dim, 1.0))
            k_clip.append(ClipRows(head, kv, kv + self.nope, 0.5))
        query = Role(kind="matrix", head_blocks=(q_dim,) * self.heads, clip=tuple(q_clip))
        key_values = (self.nope, self.value) * self.heads
        roles = {
            "kv_a_proj_with_mqa.weight": matrix,
            "kv_b_proj.weight": Role(kind="matrix", blocks=key_values, head_blocks=key_values, clip=tuple(k_clip)),
            "o_proj.weight": matrix,
        }
        if self.config.q_lora_rank is None:
            roles["q_proj.weight"] = query
        else:
            roles |= {"q_a_proj.weight": matrix, "q_b_proj.weight": query}
        if self.g_proj is not None:
            roles["g_proj.weight"] = Role(kind="matrix", head_blocks=(self.value,) * self.heads)
        return roles

    def flops_per_token(self, context_length: int) -> int:
        """Forward FLOPs a token at a training length (expanded form); the causal half of the scores is counted."""
        weights = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        return 2 * weights + self.heads * (self.nope + self.rope + self.value) * (context_length + 1)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the neighbouring pairs (2i, 2i + 1) of x [1, N, H, rope], the published weight order.

    The result is left in half-split order: queries and keys are permuted alike, so no score changes.
    """
    return apply_rotary(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), cos, sin)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
