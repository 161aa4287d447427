"""What a parameter is, declared once by the module that owns it.

Optimizer grouping, per-head Muon, sharded offsets and QK-Clip all read this one declaration:
``module.parameter_roles() -> {name relative to the module: Role}``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RoleKind = Literal[
    "matrix",  # a linear map between activations: Muon
    "router",  # the routing matrix of a mixture of experts: Muon, whole
    "embedding",
    "head",
    "norm",  # a gain: AdamW with decay
    "gate",  # decay rates and their biases (A_log, dt_bias): AdamW without decay
    "convolution",
    "depth_query",  # the [d] or [1, d] query of an attention residual
    "bias",
    "vector",  # any other small parameter
]
Initial = Literal["normal", "ones", "zeros", "custom"]
MATRIX_KINDS = ("matrix", "router")


@dataclass(frozen=True)
class ClipRows:
    """Rows of a weight that QK-Clip multiplies by ``gamma[head] ** power``.

    head: one query head, or several that share the rows (then the smallest of their gammas counts).
    rule: empty = always; otherwise the rows count only when the optimizer's ``qk_clip_rule`` has this name
        ("per_query_head" leaves keys that several heads share alone, "grouped" scales the whole group).
    """

    head: int | tuple[int, ...]
    start: int
    stop: int
    power: float
    rule: str = ""


def grouped_query_clip(heads: int, kv_heads: int, head_dim: int) -> tuple[tuple[ClipRows, ...], tuple[ClipRows, ...]]:
    """Clip rows of the query and of the key projection, head by head, when ``heads / kv_heads`` queries share a key.

    A head with a key of its own gives half of gamma on each side. Keys that a group shares are left alone by the rule
    "per_query_head", which scales the query by all of gamma; "grouped" halves it over the whole group.
    """
    d, group = head_dim, heads // kv_heads
    if group == 1:
        rows = tuple(ClipRows(h, h * d, (h + 1) * d, 0.5) for h in range(heads))
        return rows, rows
    groups = [tuple(range(g * group, (g + 1) * group)) for g in range(kv_heads)]
    alone = tuple(ClipRows(h, h * d, (h + 1) * d, 1.0, "per_query_head") for h in range(heads))
    together = tuple(ClipRows(m, m[0] * d, (m[-1] + 1) * d, 0.5, "grouped") for m in groups)
    keys = tuple(ClipRows(m, g * d, (g + 1) * d, 0.5, "grouped") for g, m in enumerate(groups))
    return alone + together, keys


@dataclass(frozen=True, kw_only=True)
class Role:
    """How one parameter is treated.

    blocks: row counts (along dim -2) of the logical matrices that a fused weight holds; empty = one matrix.
    head_blocks: row counts of the finest blocks, used instead of ``blocks`` by per-head Muon; empty = ``blocks``.
    decay: whether weight decay applies. dtype: "float32" keeps the parameter in fp32 whatever the model's dtype.
    clip: the rows QK-Clip may scale; only modules with softmax attention declare any, and such a module
        exposes its running maxima as ``max_logits`` (fp32, [heads]).
    initial: how the parameter is drawn; "normal" uses ``std``, "custom" asks the owner's
        ``initial_value(name, shape, generator)``.
    """

    kind: RoleKind
    blocks: tuple[int, ...] = ()
    head_blocks: tuple[int, ...] = ()
    decay: bool = True
    dtype: str | None = None
    clip: tuple[ClipRows, ...] = ()
    initial: Initial = "normal"
    std: float = 0.02

    @property
    def is_matrix(self) -> bool:
        return self.kind in MATRIX_KINDS
