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
from typing import NamedTuple

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
        self._folded: tuple[tuple | None, two_phase.Folded] | None = None
        self.following: tuple[AttentionResidual, ...] = ()  # set by link_depth; a tuple, so not a submodule

    def read(self, state: DepthState, norm: nn.Module | None = None) -> Tensor:
        """[1, N, width]: the mixture over depth, with ``norm`` applied when given (fused: nothing more is kept)."""
        partial = state.partial
        if state.ahead is not None and partial is not None:
            return self._read_ahead(state.ahead, partial, norm)
        first = state.blocks[0] if state.blocks else partial
        assert first is not None
        with _no_autocast(first.device.type):  # scores, softmax and sum stay fp32
            return self._read(state, norm)

    def _read_ahead(
        self, ahead: two_phase.Ahead | two_phase.AheadOfOne, partial: Tensor, norm: nn.Module | None
    ) -> Tensor:
        fused = (norm._parameters["weight"], norm.eps) if isinstance(norm, RMSNorm) else None
        h = ahead.read(ahead.last if self.index is None else self.index, partial, self.eps, fused)  # type: ignore
        return h if fused is not None or norm is None else norm(h)

    def _read(self, state: DepthState, norm: nn.Module | None) -> Tensor:
        sources = [*state.blocks] if state.partial is None else [*state.blocks, state.partial]
        fused = isinstance(norm, RMSNorm) and len(sources) > 1
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
        output = output.to(first.dtype)  # sums are kept in the embedding's dtype, also under autocast
        if partial is not None and self.index % self.block == 0:
            with _no_autocast(partial.device.type):
                return self._seal((*blocks, partial), state, output)
        # out of place: `partial` is also a source that backward needs
        return DepthState(blocks, output if partial is None else partial + output, inverse, ahead)

    def _seal(self, blocks: tuple[Tensor, ...], state: DepthState, output: Tensor) -> DepthState:
        single = output.numel() == output.shape[-1]  # for one token phase one pays even for a single reader
        if len(self.following) > (0 if single else 1) and not torch.is_grad_enabled():
            folded = self._folded_queries(blocks[0].dtype)
            if folded is not None and len(folded.rows) * blocks[0].numel() <= two_phase.LIMIT:
                assert self.index is not None
                ahead = two_phase.look_ahead(self.index + 1, blocks, folded, self.eps, state.ahead)
                return DepthState(blocks, output, (), ahead)
        known = state.inverse_rms if len(state.inverse_rms) == len(blocks) - 1 else ()  # () after a two-phase step
        missing = tuple(inverse_rms_of(block, self.eps) for block in blocks[len(known) :])
        return DepthState(blocks, output, (*known, *missing))

    def _folded_queries(self, dtype: torch.dtype) -> two_phase.Folded | None:
        """Query * norm weight of the sublayers that read the blocks sealed here; None if sharded.

        Kept until one of the parameters changes, moves or is replaced. (Attribute access on modules is slow enough to
        matter at one token a call, hence the dictionaries.)
        """
        parts = [other._modules for other in self.following]
        queries = [part["proj"]._parameters["weight"] for part in parts]  # type: ignore[union-attr]
        norms = [part["norm"]._parameters["weight"] for part in parts]  # type: ignore[union-attr]
        if hasattr(queries[0], "device_mesh"):
            return None  # DTensors: other layers' parameters are not at hand
        work = torch.promote_types(dtype, torch.float32)
        counted = not queries[0].is_inference()  # type: ignore[union-attr]
        key = (work, *((p.data_ptr(), p._version) for p in (*queries, *norms))) if counted else None  # type: ignore
        if self._folded is None or key is None or self._folded[0] != key:
            matrix = torch.cat(queries).to(work) * torch.stack(norms).to(work)  # type: ignore[arg-type]
            self._folded = key, two_phase.Folded(matrix, matrix.unbind(0))
        return self._folded[1]

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


def _no_autocast(device: str) -> AbstractContextManager:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _identity(embedding: Tensor) -> Tensor:
    return embedding


def _start(embedding: Tensor) -> DepthState:
    return DepthState((), embedding)
