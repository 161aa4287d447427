"""Residual connections: how a sublayer reads the depth state and writes its output back.

``standard`` adds to one stream. ``attention`` and ``block_attention`` are Attention Residuals (arXiv 2603.15031,
section 3; Kimi K3 report, section 2.2): every sublayer reads a learned, token-wise softmax mixture of the embedding and
of earlier outputs, one source per sublayer (full) or per block of ``block`` sublayers (block form).

The contract, used by the decoder for every sublayer (a mixer or a feed-forward)::

    state = config.build_start()(embedding)
    x     = connection.read(state, norm)         # pre-norm applied; without `norm` the bare mixed value
    state = connection.write(state, sublayer(x))
    h     = output.read(state)                   # output = config.build_output(context)

``config.build(context, sublayer)`` is told the sublayer's number over the whole decoder (2 per decoder layer, from 0).

Order (the same in the paper and in K3): mix first, then seal. A sublayer whose index is a multiple of ``block`` still
reads the finished block as a separate source; its write then seals that block and opens the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triscale.config import Role
from triscale.ops.depth_attention import inverse_rms_of, mix_over_depth

from .context import BuildContext
from .norm import RMSNorm

# Elements of the two-phase buffer above which inference falls back to the plain form (256 MB of fp32).
TWO_PHASE_LIMIT = 1 << 26


class StandardResidual(nn.Module):
    """``x + f(norm(x))``: the depth state is the hidden state itself."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        def build_start(self) -> Callable[[Tensor], Tensor]:
            return _identity

        def build(self, context: BuildContext, sublayer: int) -> StandardResidual:
            return StandardResidual()

        def build_output(self, context: BuildContext) -> StandardResidual:
            return StandardResidual()

    def read(self, state: Tensor, norm: nn.Module | None = None) -> Tensor:
        return state if norm is None else norm(state)

    def write(self, state: Tensor, output: Tensor) -> Tensor:
        return state + output

    def parameter_roles(self) -> dict[str, Role]:
        return {}

    def flops_per_token(self) -> int:
        return 0


class Ahead(NamedTuple):
    """Phase one of the two-phase form: the coming sublayers' queries against the sealed blocks, done together."""

    first: int  # sublayer index of row 0
    folded: Tensor  # [Q, D] query * norm weight
    mixed: Tensor  # [Q, tokens, D] normalised mixtures of the sealed blocks
    log_sum: Tensor  # [Q, tokens] log of the sum of exponentiated scores


class DepthState(NamedTuple):
    """Sealed blocks (the first is the embedding; shared references, never copied) and the open block's sum."""

    blocks: tuple[Tensor, ...]
    partial: Tensor | None
    inverse_rms: tuple[Tensor, ...] = ()  # one [tokens] tensor per sealed block, constant through autograd
    ahead: Ahead | None = None


class AttentionResidual(nn.Module):
    """Full Attention Residual of one sublayer; with ``block`` > 1 the block form.

    index: the sublayer's number, 0-based over the whole decoder (2 per decoder layer); None marks the output mix.
    Parameters: ``proj.weight`` [1, width] (the query, zero at the start, so that the first step reads the mean of the
    sources) and ``norm.weight`` [width].
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        def build_start(self) -> Callable[[Tensor], DepthState]:
            return _start

        def build(self, context: BuildContext, sublayer: int) -> AttentionResidual:
            return AttentionResidual(context, index=sublayer, block=1)

        def build_output(self, context: BuildContext) -> AttentionResidual:
            return AttentionResidual(context, index=None, block=1)

    def __init__(self, context: BuildContext, *, index: int | None, block: int):
        super().__init__()
        self.index, self.block, self.depth = index, block, context.depth
        self.proj = nn.Linear(context.width, 1, bias=False, **context.factory)
        nn.init.zeros_(self.proj.weight)
        self.norm = RMSNorm(context.width, context.norm_eps, **context.factory)
        self.following: tuple[AttentionResidual, ...] = ()  # set by link_depth; a tuple, so not a submodule

    def read(self, state: DepthState, norm: nn.Module | None = None) -> Tensor:
        """[1, N, width]: the mixture over depth, with ``norm`` applied when given (fused: nothing more is kept)."""
        first = state.blocks[0] if state.blocks else state.partial
        assert first is not None
        with torch.autocast(first.device.type, enabled=False):  # scores, softmax and sum stay fp32
            return self._read(state, norm)

    def _read(self, state: DepthState, norm: nn.Module | None) -> Tensor:
        if state.ahead is not None and state.partial is not None:
            mixed = self._merge(state.ahead, state.partial)
            return mixed if norm is None else norm(mixed)
        sources = [*state.blocks] if state.partial is None else [*state.blocks, state.partial]
        fused = isinstance(norm, RMSNorm) and len(sources) > 1
        mixed = mix_over_depth(
            sources,
            self.proj.weight,
            self.norm.weight,
            self.norm.eps,
            inverse_rms=state.inverse_rms,
            output_norm=(norm.weight, norm.eps) if fused else None,  # type: ignore[union-attr, arg-type]
        )
        return mixed if fused or norm is None else norm(mixed)

    def write(self, state: DepthState, output: Tensor) -> DepthState:
        """Add the sublayer's output to the open block, or seal that block and start the next with it."""
        assert self.index is not None, "the output mix is only read"
        blocks, partial, inverse, ahead = state
        first = blocks[0] if blocks else partial
        assert first is not None
        output = output.to(first.dtype)  # sums are kept in the embedding's dtype, also under autocast
        if partial is not None and self.index % self.block == 0:
            with torch.autocast(partial.device.type, enabled=False):
                blocks, inverse = (*blocks, partial), (*inverse, inverse_rms_of(partial, self.norm.eps))
                return DepthState(blocks, output, inverse, self._look_ahead(blocks, inverse))
        # out of place: `partial` is also a source that backward needs
        return DepthState(blocks, output if partial is None else partial + output, inverse, ahead)

    def _look_ahead(self, blocks: Sequence[Tensor], inverse: Sequence[Tensor]) -> Ahead | None:
        """Phase one, in inference only: one pass over the sealed blocks for all sublayers that will read them."""
        rows, tokens = len(self.following), inverse[0].numel()
        if rows < 2 or torch.is_grad_enabled() or rows * blocks[0].numel() > TWO_PHASE_LIMIT:
            return None
        if any(hasattr(other.proj.weight, "device_mesh") for other in self.following):
            return None  # sharded (DTensor): other layers' queries are not at hand
        work = inverse[0].dtype
        queries = torch.cat([other.proj.weight for other in self.following]).to(work)
        folded = queries * torch.stack([other.norm.weight for other in self.following]).to(work)
        values = torch.stack(tuple(blocks)).reshape(len(blocks), tokens, -1).to(work)
        scores = (values @ folded.mT).mul_(torch.stack(tuple(inverse))[..., None])  # [n, tokens, Q]
        mixed = torch.einsum("ntq,ntd->qtd", torch.softmax(scores, 0), values)
        assert self.index is not None
        return Ahead(self.index + 1, folded, mixed, torch.logsumexp(scores, 0).mT)

    def _merge(self, ahead: Ahead, partial: Tensor) -> Tensor:
        """Phase two: online-softmax merge of the open block's sum, h = (1 - a) mixed + a partial."""
        row = len(ahead.folded) - 1 if self.index is None else self.index - ahead.first
        value = partial.reshape(ahead.mixed.shape[1:]).to(ahead.mixed.dtype)
        score = F.rms_norm(value, value.shape[-1:], None, self.norm.eps) @ ahead.folded[row]
        weight = torch.sigmoid(score - ahead.log_sum[row])
        return torch.lerp(ahead.mixed[row], value, weight[:, None]).to(partial.dtype).reshape(partial.shape)

    def parameter_roles(self) -> dict[str, Role]:
        return {"proj.weight": Role(kind="depth_query", initial="zeros")}

    def flops_per_token(self) -> int:
        """Score, norm and weighted sum of every source this sublayer reads: 6 FLOPs per source and channel."""
        return 6 * self.proj.in_features * self.sources

    @property
    def sources(self) -> int:
        """Sources mixed here: the embedding, the finished blocks and the open one."""
        index = 2 * self.depth if self.index is None else self.index
        return 1 if index == 0 else (index - 1) // self.block + 2

    def extra_repr(self) -> str:
        return f"index={self.index}, block={self.block}, sources={self.sources}"


class BlockAttentionResidual(AttentionResidual):
    """Block Attention Residual: one source per ``block`` sublayers (two sublayers per decoder layer)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        block: int = 4

        def __post_init__(self) -> None:
            if self.block < 1:
                raise ValueError(f"block: {self.block} sublayers per block; use 1 or more")

        def build_start(self) -> Callable[[Tensor], DepthState]:
            return _start

        def build(self, context: BuildContext, sublayer: int) -> BlockAttentionResidual:
            return BlockAttentionResidual(context, index=sublayer, block=self.block)

        def build_output(self, context: BuildContext) -> BlockAttentionResidual:
            return BlockAttentionResidual(context, index=None, block=self.block)


def link_depth(connections: Sequence[nn.Module], output: nn.Module) -> None:
    """Tell each sealing connection which sublayers will read the blocks it seals (enables two-phase inference).

    connections: all sublayers' connections in order. Connections of other kinds are left alone. Where parameters of
    other layers are not at hand (sharded modules), leave connections unlinked: the plain form gives the same values.
    """
    chain = [*connections, output]
    if not all(isinstance(connection, AttentionResidual) for connection in chain):
        return
    for place, connection in enumerate(chain[:-1]):
        assert isinstance(connection, AttentionResidual)
        readers = chain[place + 1 : place + 1 + connection.block] if place % connection.block == 0 else []
        connection.following = tuple(readers)  # type: ignore[arg-type]


def _identity(embedding: Tensor) -> Tensor:
    return embedding


def _start(embedding: Tensor) -> DepthState:
    return DepthState((), embedding)
