"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, section 4; bounded variant: Kimi K3, arXiv 2607.24653, 2.1.1).

    q, k = L2Norm(SiLU(conv(q_proj x))), L2Norm(SiLU(conv(k_proj x)))        v = SiLU(conv(v_proj x))
    z    = f_b_proj(f_a_proj x) + dt_bias                                    one logit per head and key channel
    g    = -exp(A_log) softplus(z)            (Kimi Linear)                  log decay, fp32
    g    = lower_bound * sigmoid(exp(A_log) z)        (K3)
    beta = sigmoid(b_proj x)
    y    = o_proj( sigmoid(gate(x)) * RMSNorm_head(gated_delta_rule(q, k, v, g, beta)) )

``decay = "head"`` gives one decay per head (Gated DeltaNet, arXiv 2412.06464) with everything else unchanged: the
comparison arm that isolates the channel-wise gate. Parameters carry the released checkpoints' names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triscale.config import Role
from triscale.ops.delta_rule.dispatch import gated_delta_rule
from triscale.ops.delta_rule.step import gated_delta_rule_step
from triscale.ops.short_convolution import causal_short_convolution
from triscale.ops.unit_length import to_unit_length

from .batch import TokenBatch
from .cache_spec import CacheSpec
from .context import BuildContext
from .norm import RMSNorm

NORM_EPS = 1e-6  # of the L2 norm of q and k, on the sum of squares
CHUNK = 64


class KimiDeltaAttention(nn.Module):
    """Linear attention with a fixed-size state [value heads, K, V] per sequence; [1, N, width] -> [1, N, width]."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The released shapes are heads x 128 with a convolution of 4.

        head_dim: key width per head; None = width / heads. value_heads, value_head_dim: None = as for the keys; more
        value heads than heads share queries and keys in groups. gate: "softplus" (Kimi Linear) or "bounded" (K3, decay
        above exp(lower_bound)). decay: "channel" (KDA) or "head" (Gated DeltaNet). output_gate: "low_rank" (Kimi
        Linear) or "full_rank" (K3). gate_rank: inner width of the low-rank gates; None = the value head width.
        """

        heads: int = 4
        head_dim: int | None = None
        value_heads: int | None = None
        value_head_dim: int | None = None
        convolution: int = 4
        gate: Literal["softplus", "bounded"] = "softplus"
        lower_bound: float = -5.0
        decay: Literal["channel", "head"] = "channel"
        output_gate: Literal["low_rank", "full_rank"] = "low_rank"
        gate_rank: int | None = None

        def __post_init__(self) -> None:
            for name in ("heads", "head_dim", "value_heads", "value_head_dim", "convolution", "gate_rank"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ValueError(f"{name}: {value} must be at least 1")
            if (self.value_heads or self.heads) % self.heads:
                raise ValueError(f"value_heads: {self.value_heads} must be a multiple of heads ({self.heads})")
            if not self.lower_bound < 0:
                raise ValueError(f"lower_bound: {self.lower_bound} must be below 0 (the released value is -5)")

        def build(self, context: BuildContext) -> KimiDeltaAttention:
            if self.head_dim is None and context.width % self.heads:
                raise ValueError(f"heads: {self.heads} does not divide the width {context.width}; set head_dim")
            return KimiDeltaAttention(self, context)

    def __init__(self, config: Config, context: BuildContext):
        super().__init__()
        self.config, self.width = config, context.width
        self.heads, self.key_width = config.heads, config.head_dim or context.width // config.heads
        self.value_heads = config.value_heads or config.heads
        self.value_width = config.value_head_dim or self.key_width
        self.sections = (self.heads * self.key_width,) * 2 + (self.value_heads * self.value_width,)
        keys, values, rank = self.sections[0], self.sections[2], config.gate_rank or self.value_width

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, **context.factory)

        self.q_proj, self.k_proj, self.v_proj = (linear(self.width, n) for n in (keys, keys, values))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            DepthwiseKernel(n, config.convolution, context) for n in (keys, keys, values)
        )
        decays = self.value_heads * (self.key_width if config.decay == "channel" else 1)
        if config.decay == "channel":
            self.f_a_proj, self.f_b_proj = linear(self.width, rank), linear(rank, decays)
        else:
            self.f_proj = linear(self.width, decays)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads, dtype=torch.float32, device=context.device))
        self.dt_bias = nn.Parameter(torch.zeros(decays, dtype=torch.float32, device=context.device))
        self.b_proj = linear(self.width, self.value_heads)
        if config.output_gate == "low_rank":
            self.g_a_proj, self.g_b_proj = linear(self.width, rank), linear(rank, values)
        else:
            self.g_proj = linear(self.width, values)
        self.o_norm = RMSNorm(self.value_width, context.norm_eps, **context.factory)
        self.o_proj = linear(values, self.width)

    def forward(self, x: Tensor, batch: TokenBatch, cache=None) -> Tensor:
        """x [1, N, width] -> [1, N, width]; states of the batch's sequences are read from and written to ``cache``."""
        q, k, v = self._convolved(x, batch, cache)
        g, beta = self.log_decay(x), torch.sigmoid(_accumulated(self.b_proj(x)))
        if cache is None:
            o, _ = gated_delta_rule(q, k, v, g, beta, cu_seqlens=_offsets(batch), chunk_size=CHUNK)
        else:
            o = self._with_state(q, k, v, g, beta, batch, cache)
        return self.o_proj(self._gated(o, x))

    def _convolved(self, x: Tensor, batch: TokenBatch, cache) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [1, N, H, K] of unit length and v [1, N, HV, V]; one product and one convolution for the three."""
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        kernel = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        projected = F.linear(x, weight)
        if cache is None:
            y, _ = causal_short_convolution(projected, kernel.to(projected.dtype), cu_seqlens=_offsets(batch))
        else:
            y, state = causal_short_convolution(
                projected, kernel.to(projected.dtype), cu_seqlens=_offsets(batch), output_final_state=True,
                initial_state=cache.state(batch, "convolution"),
            )  # fmt: skip
            cache.set_state(batch, convolution=state)
        q, k, v = F.silu(y).split(self.sections, dim=-1)
        q, k = (to_unit_length(t.unflatten(-1, (self.heads, self.key_width)), NORM_EPS) for t in (q, k))
        return q, k, v.unflatten(-1, (self.value_heads, self.value_width))

    def log_decay(self, x: Tensor) -> Tensor:
        """g [1, N, HV, K], or [1, N, HV] with one decay per head; fp32."""
        z = self.f_b_proj(self.f_a_proj(x)) if self.config.decay == "channel" else self.f_proj(x)
        z = _accumulated(z) + self.dt_bias
        rate = self.A_log.to(z.dtype).exp()
        if self.config.decay == "channel":
            z, rate = z.unflatten(-1, (self.value_heads, self.key_width)), rate.unsqueeze(-1)
        if self.config.gate == "bounded":
            return self.config.lower_bound * torch.sigmoid(rate * z)
        return -rate * F.softplus(z)

    def _with_state(self, q, k, v, g, beta, batch: TokenBatch, cache) -> Tensor:
        state = cache.state(batch, "state")
        if batch.equal_rows is not None and batch.equal_rows[1] == 1 and not torch.is_grad_enabled():
            state = state.to(torch.promote_types(state.dtype, g.dtype))
            q, k, v, g, beta = (t.transpose(0, 1) for t in (q, k, v, g, beta))  # decode: one token of every sequence
            o = gated_delta_rule_step(q, k, v, g, beta, state).transpose(0, 1)
        else:
            o, state = gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True,
                                        cu_seqlens=_offsets(batch), chunk_size=CHUNK)  # fmt: skip
        cache.set_state(batch, state=state)
        return o

    def _gated(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.g_b_proj(self.g_a_proj(x)) if self.config.output_gate == "low_rank" else self.g_proj(x)
        gated = _accumulated(self.o_norm(o)).flatten(-2) * torch.sigmoid(_accumulated(gate))
        return gated.to(x.dtype)

    def cache_spec(self) -> CacheSpec:
        """Fixed size whatever the context: the last inputs of the convolution and one fp32 state per value head."""
        history = ((self.config.convolution - 1, sum(self.sections)), None)
        state = ((self.value_heads, self.key_width, self.value_width), torch.float32)
        return CacheSpec(per_sequence={"convolution": history, "state": state})

    def parameter_roles(self) -> dict[str, Role]:
        """Decay rates and their biases are fp32 and do not decay. What speaks to one head is cut by head in per-head
        mode (Kimi K3, arXiv 2607.24653, section 2.5): q, k, v, the decays per channel, and the output gate."""
        key_heads, value_heads = (self.key_width,) * self.heads, (self.value_width,) * self.value_heads
        bounded = self.config.gate == "bounded"
        roles = {
            "q_proj.weight": Role(kind="matrix", head_blocks=key_heads),
            "k_proj.weight": Role(kind="matrix", head_blocks=key_heads),
            "v_proj.weight": Role(kind="matrix", head_blocks=value_heads),
            "A_log": Role(kind="gate", decay=False, dtype="float32", initial="zeros" if bounded else "custom"),
            "dt_bias": Role(kind="gate", decay=False, dtype="float32", initial="custom"),
        }
        roles["b_proj.weight"] = Role(kind="vector")  # one gate a head, not a map between activations: AdamW
        heads = {"f_b_proj": (self.key_width,) * self.value_heads, "g_b_proj": value_heads, "g_proj": value_heads}
        for name in ("f_a_proj", "f_b_proj", "f_proj", "g_a_proj", "g_b_proj", "g_proj", "o_proj"):
            if hasattr(self, name):
                roles[f"{name}.weight"] = Role(kind="matrix", head_blocks=heads.get(name, ()))
        return roles

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """A_log = log U(1, 16); dt_bias such that softplus(dt_bias) is log-uniform in [1e-3, 1e-1]."""
        uniform = torch.rand(shape, generator=generator, dtype=torch.float32)
        if name == "A_log":
            return (1 + 15 * uniform).log()
        low, high = math.log(1e-3), math.log(1e-1)
        dt = (low + (high - low) * uniform).exp().clamp(min=1e-4)
        return dt + (-torch.expm1(-dt)).log()

    def flops_per_token(self, context_length: int) -> int:
        """Forward FLOPs a token at the training chunk; independent of the context (Kimi Linear, section 4)."""
        weights = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        convolution = 2 * self.config.convolution * sum(self.sections)
        keys, values, chunk = self.key_width, self.value_width, min(CHUNK, max(context_length, 1))
        rule = 6 * keys * values + 3 * chunk * (keys + values) // 2 + chunk * chunk
        return 2 * weights + convolution + self.value_heads * rule


class DepthwiseKernel(nn.Module):
    """The weight [channels, 1, W] of a short convolution, under the name the released checkpoints give it."""

    def __init__(self, channels: int, taps: int, context: BuildContext):
        super().__init__()
        weight = torch.empty(channels, 1, taps, **context.factory)
        self.weight = nn.Parameter(weight.uniform_(-(taps**-0.5), taps**-0.5))

    def parameter_roles(self) -> dict[str, Role]:
        return {"weight": Role(kind="convolution")}


def _offsets(batch: TokenBatch) -> tuple[int, ...]:
    """Cumulative lengths on the host, made once per batch."""
    if "offsets" not in batch.memo:
        offsets = [0]
        for length in batch.lengths:
            offsets.append(offsets[-1] + length)
        batch.memo["offsets"] = tuple(offsets)
    return batch.memo["offsets"]


def _accumulated(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
