"""Before anything is copied: which published tensor feeds which of ours, and that all are there exactly once."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from triscale.config import ConfigError, TriScaleError
from triscale.models.decoder import Decoder

from .family import Family, detect_family
from .names import Piece, Shape, pieces
from .packed import unpack_fp8_blocks, unpack_int4, unpack_mxfp4
from .shards import ShardReader, Stored

Form = Literal["plain", "mxfp4", "int4", "fp8"]
SHOWN = 8  # names listed in an error


@dataclass(frozen=True)
class Source:
    """Where a piece comes from: one tensor, or the tensors of a packed weight."""

    piece: Piece
    form: Form
    names: tuple[str, ...]


@dataclass(frozen=True)
class Origin:
    """What our format has no place for but an export must reproduce.

    config: the config.json as published. a_log: published shape of the decay rates.
    """

    family: str
    config: dict[str, Any]
    a_log: Shape | None = None


@dataclass
class ImportPlan:
    """Everything a reader needs, checked. aside: tensors of another part (vision). skipped: tensors nothing needs."""

    family: Family
    config: Decoder.Config
    origin: Origin
    sources: list[Source]
    shapes: dict[str, Shape]
    aside: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def forms(self) -> dict[str, int]:
        """How many weights came in each packed form."""
        counts: dict[str, int] = {}
        for source in self.sources:
            if source.form != "plain":
                counts[source.form] = counts.get(source.form, 0) + 1
        return counts


def read_config(folder: str | Path) -> dict[str, Any]:
    file = Path(folder) / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(str(folder), "holds no config.json, so it is not a published model") from error
    except ValueError as error:
        raise ConfigError(str(file), f"is not JSON ({error})") from error


def decoder_shapes(config: Decoder.Config) -> dict[str, Shape]:
    """{our tensor: shape} of a decoder, built on the meta device; a tied head is left out."""
    state = config.build(device="meta").state_dict()
    return {n: tuple(t.shape) for n, t in state.items() if not (config.tied_head and n == "head.weight")}


def plan_import(published: Mapping[str, Any], reader: ShardReader, family: Family | None = None) -> ImportPlan:
    """Match a published folder with our model.

    Raises :class:`TriScaleError` that lists every missing and every left-over tensor, and :class:`ConfigError` for a
    config or a shape that is not supported.
    """
    family = family or detect_family(published)
    config = family.read(published)
    shapes = decoder_shapes(config)
    a_log = next((s.shape for n, s in reader.tensors.items() if n.endswith(".self_attn.A_log")), None)
    sources: list[Source] = []
    missing: list[str] = []
    used: set[str] = set()
    for piece in pieces(shapes, family.naming, a_log):
        source = _find(piece, reader.tensors, family.naming.block)
        if source is None:
            missing.append(piece.theirs)
            continue
        _check_shape(source, reader.tensors)
        sources.append(source)
        used.update(source.names)
    plan = ImportPlan(family, config, Origin(family.name, dict(published), a_log), sources, shapes)
    left = _sort_rest(plan, sorted(reader.tensors.keys() - used), published, reader.tensors)
    if missing or left:
        raise TriScaleError(
            f"the tensors do not fit {family.name}: " + "; ".join(_list(k, v) for k, v in
            (("missing", missing), ("left over", left)) if v)
        )  # fmt: skip
    return plan


def _find(piece: Piece, tensors: Mapping[str, Stored], block: str) -> Source | None:
    name = piece.theirs
    if name not in tensors and ".mlp." in name:  # transformers saves a dense layer under the name of the experts' block
        alias = name.replace(".mlp.", f".{block}.", 1)
        name = alias if alias in tensors else name
    if name in tensors:
        inverse = f"{name}_scale_inv"
        return Source(piece, "fp8", (name, inverse)) if inverse in tensors else Source(piece, "plain", (name,))
    packed, scale, shape = (f"{name}_{part}" for part in ("packed", "scale", "shape"))
    if packed in tensors and scale in tensors:
        # decided by the tensors present: the config's ignore list does not name everything that is stored plainly
        if tensors[packed].dtype == torch.uint8:
            return Source(piece, "mxfp4", (packed, scale))
        if shape in tensors:
            return Source(piece, "int4", (packed, scale, shape))
    return None


def _check_shape(source: Source, tensors: Mapping[str, Stored]) -> None:
    piece, stored = source.piece, tensors[source.names[0]]
    expected = {"mxfp4": (piece.shape[0], piece.shape[-1] // 2), "int4": (piece.shape[0], -(-piece.shape[-1] // 8))}
    wanted = expected.get(source.form, piece.shape)
    if stored.shape != wanted:
        raise ConfigError(source.names[0], f"has shape {list(stored.shape)}, but config.json means {list(wanted)}")


def _sort_rest(
    plan: ImportPlan, rest: list[str], published: Mapping[str, Any], tensors: Mapping[str, Stored]
) -> list[str]:
    """Put the unused tensors where they belong; what is left fits nowhere."""
    left = []
    for name in rest:
        if plan.family.is_aside(name):
            plan.aside.append(name)
        elif (
            plan.family.is_skipped(name)
            or _is_prediction_layer(name, plan.config.depth, published)
            or (name.endswith("lm_head.weight") and plan.config.tied_head)
        ):
            plan.skipped.append(name)
        else:
            left.append(name)
    if plan.aside and plan.family.aside_shapes is not None:
        expected = plan.family.aside_shapes(published)
        for name in plan.aside:
            if expected.get(name) != tensors[name].shape:
                wanted = list(expected[name]) if name in expected else "no such tensor"
                raise ConfigError(name, f"has shape {list(tensors[name].shape)}, but vision_config means {wanted}")
        absent = sorted(expected.keys() - set(plan.aside))
        if absent:
            raise TriScaleError(_list("missing", absent))
    return left


def _is_prediction_layer(name: str, depth: int, published: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a multi-token prediction layer, which releases store behind the last layer."""
    text = published.get("text_config", published)
    match = re.search(r"model\.layers\.(\d+)\.", name)
    return match is not None and depth <= int(match[1]) < depth + (text.get("num_nextn_predict_layers") or 0)


def _list(what: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}"


def read_source(source: Source, reader: ShardReader) -> Tensor:
    """The values of one piece as published: unpacked to bf16 if they were packed, without padding."""
    parts = [reader.read(name) for name in source.names]
    if source.form == "mxfp4":
        return unpack_mxfp4(parts[0], parts[1])
    if source.form == "int4":
        return unpack_int4(parts[0], parts[1], parts[2])
    if source.form == "fp8":
        return unpack_fp8_blocks(parts[0], parts[1])
    return parts[0]


def place(source: Source, value: Tensor, size: int) -> Tensor:
    """``value`` as the flat run of our tensor it stands for; ``size`` elements if it was padded."""
    flat = value.reshape(-1)
    if source.piece.padded:
        if flat[size:].any():
            raise TriScaleError(f"{source.piece.theirs}: {flat.numel()} values for {size}, and the rest is not zero")
        flat = flat[:size]
    return flat


def our_dtypes(plan: ImportPlan, reader: ShardReader, dtype: torch.dtype | None = None) -> dict[str, torch.dtype]:
    """Dtype of each of our tensors: as stored (bf16 for packed weights), or ``dtype`` except where fp32 must stay."""
    result: dict[str, torch.dtype] = {}
    for source in plan.sources:
        stored = reader.tensors[source.names[0]].dtype if source.form == "plain" else torch.bfloat16
        if dtype is not None and not (plan.family.stays_fp32(source.piece.theirs) and dtype.itemsize < 4):
            stored = dtype
        ours = source.piece.ours
        result[ours] = torch.promote_types(result[ours], stored) if ours in result else stored
    return result


def in_file_order(plan: ImportPlan, reader: ShardReader) -> Iterator[Source]:
    """The sources, those of one shard after those of another."""
    return iter(sorted(plan.sources, key=lambda s: reader.tensors[s.names[0]].file))


def element_count(shape: Shape) -> int:
    return math.prod(shape)
