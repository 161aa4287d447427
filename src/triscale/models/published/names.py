"""Which published tensor holds which part of ours.

A decoder's tensors are renamed one by one, except that our experts are stacked: ``gate_up_proj`` [E, 2 M, D] (gate
rows first) and ``down_proj`` [E, D, M] fall into three published matrices per expert. Every piece is a contiguous run of our
tensor, so both directions can stream.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from triscale.config import TriScaleError

Shape = tuple[int, ...]
LAYER = re.compile(r"layers\.(\d+)\.(.+)")
GLOBAL = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "output_residual.proj.weight": "model.output_attn_res_proj.weight",
    "output_residual.norm.weight": "model.output_attn_res_norm.weight",
}
SUBLAYER = {
    "mixer_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "mixer_residual.proj.weight": "self_attention_res_proj.weight",
    "mixer_residual.norm.weight": "self_attention_res_norm.weight",
    "feed_forward_residual.proj.weight": "mlp_res_proj.weight",
    "feed_forward_residual.norm.weight": "mlp_res_norm.weight",
}
DENSE = tuple(f"{name}_proj.weight" for name in ("gate", "up", "down"))
# inside a mixture of experts the names below the block are the published ones
EXPERT_BLOCK = re.compile(
    r"gate\.weight|gate\.e_score_correction_bias|shared_experts\.(?:gate|up|down)_proj\.weight"
    r"|routed_expert_(?:down_proj|up_proj|norm)\.weight"
)
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True)
class Naming:
    """How one family names things. prefix: before every text-model tensor. block: the mixture of experts in a layer.
    expert: gate, up and down matrix of one expert."""

    prefix: str = ""
    block: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Piece:
    """A published tensor and its place in ours.

    shape: as published. part: the index of its values in our tensor (leading axes); first: the same as the number of
    the first element. padded: the published tensor is longer than ours and ends in zeros.
    """

    theirs: str
    shape: Shape
    ours: str
    part: tuple[int | slice, ...] = ()
    first: int = 0
    padded: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def pieces(shapes: Mapping[str, Shape], naming: Naming, a_log: Shape | None = None) -> Iterator[Piece]:
    """All published tensors for a decoder of ``{our name: shape}``, in our order.

    a_log: published shape of a layer's decay rates when it is not [heads]. Raises :class:`TriScaleError` for a tensor
    the published format has no name for.
    """
    for ours, shape in shapes.items():
        if ours in GLOBAL:
            yield Piece(naming.prefix + GLOBAL[ours], shape, ours)
            continue
        match = LAYER.fullmatch(ours)
        if match is None:
            raise _nameless(ours)
        layer = f"{naming.prefix}model.layers.{match[1]}."
        yield from _layer_pieces(layer, match[2], ours, shape, naming, a_log)


def _layer_pieces(
    layer: str, local: str, ours: str, shape: Shape, naming: Naming, a_log: Shape | None
) -> Iterator[Piece]:
    kind, _, rest = local.partition(".")
    if local in SUBLAYER:
        yield Piece(layer + SUBLAYER[local], shape, ours)
    elif local == "mixer.A_log":
        published = a_log or shape
        yield Piece(f"{layer}self_attn.A_log", published, ours, padded=math.prod(published) > math.prod(shape))
    elif kind == "mixer":
        yield Piece(f"{layer}self_attn.{rest}", shape, ours)
    elif kind == "feed_forward" and rest in DENSE:
        yield Piece(f"{layer}mlp.{rest}", shape, ours)
    elif kind == "feed_forward" and EXPERT_BLOCK.fullmatch(rest):
        yield Piece(f"{layer}{naming.block}.{rest}", shape, ours)
    elif kind == "feed_forward" and rest in (GATE_UP, DOWN):
        yield from _expert_pieces(f"{layer}{naming.block}.experts.", rest, ours, shape, naming.expert)
    else:
        raise _nameless(ours)


def _expert_pieces(prefix: str, rest: str, ours: str, shape: Shape, names: tuple[str, str, str]) -> Iterator[Piece]:
    experts, rows, columns = shape
    gate, up, down = names
    for expert in range(experts):
        first = expert * rows * columns
        if rest == DOWN:
            yield Piece(f"{prefix}{expert}.{down}.weight", (rows, columns), ours, (expert,), first)
            continue
        half = rows // 2
        for name, start in ((gate, 0), (up, half)):
            part = (expert, slice(start, start + half))
            yield Piece(f"{prefix}{expert}.{name}.weight", (half, columns), ours, part, first + start * columns)


def _nameless(ours: str) -> TriScaleError:
    return TriScaleError(
        f"the published format has no name for {ours}: this model has a part that the format does not know. "
        "Keep it in TriScale's own format"
    )
