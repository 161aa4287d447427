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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from triscale.config import Role
from triscale.ops.depth_attention import inverse_rms_of, mix_over_depth

from . import two_phase
from .context import BuildContext
from .norm import RMSNorm


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


class DepthState(NamedTuple):
    """Sealed blocks (the first is the embedding; shared references, never copied) and the open block's sum."""

    blocks: tuple[Tensor, ...]
    partial: Tensor | None
    inverse_rms: tuple[Tensor, ...] = ()  # one [tokens] tensor per sealed block, constant through autograd
    ahead: two_phase.Ahead | two_phase.AheadOfOne | None = None


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
        self.eps = context.norm_eps
        self.following: two_phase.FoldCache | None = None  # queries of the readers of what is sealed here: link_depth

    def read(self, state: DepthState, norm: nn.Module | None = None) -> Tensor:
        """[1, N, width]: the mixture over depth, with ``norm`` applied when given (fused: nothing more is kept)."""
        partial = state.partial
        if state.ahead is not None and partial is not None:
            return self._read_ahead(state.ahead, partial, norm)
        if not state.blocks:  # a single source: the embedding
            assert partial is not None
            return partial if norm is None else norm(partial)
        with _no_autocast(state.blocks[0].device.type):  # scores, softmax and sum stay fp32
            return self._read(state, norm)

    def _read_ahead(
        self, ahead: two_phase.Ahead | two_phase.AheadOfOne, partial: Tensor, norm: nn.Module | None
    ) -> Tensor:
        fused = (norm._parameters["weight"], norm.eps) if isinstance(norm, RMSNorm) else None
        h = ahead.read(ahead.last if self.index is None else self.index, partial, self.eps, fused)  # type: ignore
        return h if fused is not None or norm is None else norm(h)

    def _read(self, state: DepthState, norm: nn.Module | None) -> Tensor:
        sources = [*state.blocks] if state.partial is None else [*state.blocks, state.partial]
        fused = isinstance(norm, RMSNorm)
        mixed = mix_over_depth(
            sources,
            self.proj.weight,
            self.norm.weight,
            self.eps,
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
        if output.dtype != first.dtype:
            output = output.to(first.dtype)  # sums are kept in the embedding's dtype, also under autocast
        if partial is not None and self.index % self.block == 0:
            with _no_autocast(partial.device.type):
                return self._seal((*blocks, partial), state, output)
        # out of place: `partial` is also a source that backward needs
        return DepthState(blocks, output if partial is None else partial + output, inverse, ahead)

    def _seal(self, blocks: tuple[Tensor, ...], state: DepthState, output: Tensor) -> DepthState:
        if self.following is not None and not torch.is_grad_enabled():
            single = output.numel() == output.shape[-1]  # for one token phase one pays even for a single reader
            readers = len(self.following)
            if readers > (0 if single else 1) and readers * output.numel() <= two_phase.LIMIT:
                folded = self.following.get(output.dtype)
                if folded is not None:
                    assert self.index is not None
                    ahead = two_phase.look_ahead(self.index + 1, blocks, folded, self.eps, state.ahead)
                    return DepthState(blocks, output, (), ahead)
        known = state.inverse_rms if len(state.inverse_rms) == len(blocks) - 1 else ()  # () after a two-phase step
        missing = tuple(inverse_rms_of(block, self.eps) for block in blocks[len(known) :])
        return DepthState(blocks, output, (*known, *missing))

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
        readers: Any = chain[place + 1 : place + 1 + connection.block]
        seals = place % connection.block == 0
        connection.following = two_phase.FoldCache(readers) if seals else None


def _no_autocast(device: str) -> AbstractContextManager:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _identity(embedding: Tensor) -> Tensor:
    return embedding


def _start(embedding: Tensor) -> DepthState:
    return DepthState((), embedding)
