"""Copying between a published folder and our model, one tensor at a time, in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from triscale.config import ConfigError
from triscale.models.decoder import Decoder

from .family import Family
from .names import Piece, pieces
from .packed import GROUP, pack_int4, pack_mxfp4
from .plan import ImportPlan, Origin, element_count, in_file_order, our_dtypes, place, read_source
from .shards import (
    DTYPES,
    SafetensorsWriter,
    ShardReader,
    Stored,
    plan_shards,
    shard_name,
    write_index,
)

Report = Callable[[int, int], None]  # (bytes done, bytes in all)
Pack = Literal["mxfp4", "int4"]
SHARD_BYTES = 5 * 10**9
TRAINING_ONLY = "multi_token."  # an objective's own layer: the published formats have no place for it


def stream_in(
    plan: ImportPlan, reader: ShardReader, path: Path, dtype: torch.dtype | None = None, report: Report | None = None
) -> None:
    """Write our ``model.safetensors`` from a published folder; dtype None keeps each tensor's own."""
    dtypes = our_dtypes(plan, reader, dtype)
    total, done = sum(reader.tensors[n].bytes for s in plan.sources for n in s.names), 0
    with SafetensorsWriter(path, {n: (shape, dtypes[n]) for n, shape in plan.shapes.items()}) as writer:
        for source in in_file_order(plan, reader):
            piece = source.piece
            value = place(source, read_source(source, reader), element_count(plan.shapes[piece.ours]))
            writer.write(piece.ours, value.to(dtypes[piece.ours]), piece.first)
            done += sum(reader.tensors[n].bytes for n in source.names)
            if report is not None:
                report(done, total)


@torch.no_grad()
def fill(model: Decoder, plan: ImportPlan, reader: ShardReader) -> None:
    """Copy a published folder into the parameters and buffers of ``model``."""
    state = model.state_dict()
    for source in in_file_order(plan, reader):
        target = state[source.piece.ours].view(-1)
        value = place(source, read_source(source, reader), target.numel())
        target[source.piece.first : source.piece.first + value.numel()].copy_(value)


@dataclass(frozen=True)
class Output:
    """One tensor of a published checkpoint to be written."""

    name: str
    stored: Stored
    piece: Piece
    part: int  # which of a packed weight's tensors; 0 for a plain one


class Exporter:
    """Writes our tensors under published names.

    ours: {our tensor: Stored}; read: (name, part) -> its values. dtype: of all tensors but those the family keeps in
    fp32; None keeps each tensor's own. A multi-token prediction layer is left out. pack: pack the routed experts' weights. tied: our head is the embedding.
    """

    def __init__(
        self,
        family: Family,
        ours: Mapping[str, Stored],
        read: Callable[[str, tuple[int | slice, ...]], Tensor],
        *,
        a_log: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        pack: Pack | None = None,
        tied: bool = False,
    ):
        ours = {name: stored for name, stored in ours.items() if not name.startswith(TRAINING_ONLY)}
        if tied and not family.ties:
            ours = {**ours, "head.weight": ours["embedding.weight"]}
            stored, read = read, lambda name, part: stored("embedding.weight" if name == "head.weight" else name, part)
        self.family, self.ours, self.read, self.dtype, self.pack = family, ours, read, dtype, pack
        if a_log is None and family.a_log is not None:
            heads = next((s.shape[0] for n, s in ours.items() if n.endswith("mixer.A_log")), None)
            a_log = family.a_log(heads) if heads is not None else None
        shapes = {name: stored.shape for name, stored in ours.items()}
        self.outputs = [o for piece in pieces(shapes, family.naming, a_log) for o in self._outputs(piece)]

    def _outputs(self, piece: Piece) -> list[Output]:
        if self.pack is not None and ".experts." in piece.theirs:
            rows, columns = piece.shape
            if columns % GROUP:
                raise ConfigError("pack", f"{piece.theirs} has {columns} columns, no multiple of {GROUP}")
            scale = (rows, columns // GROUP)
            parts = (
                [("packed", (rows, columns // 2), torch.uint8), ("scale", scale, torch.uint8)]
                if self.pack == "mxfp4"
                else [("packed", (rows, columns // 8), torch.int32), ("scale", scale, torch.bfloat16),
                      ("shape", (2,), torch.int64)]
            )  # fmt: skip
            return [
                Output(f"{piece.theirs}_{suffix}", Stored("", shape, dtype), piece, i)
                for i, (suffix, shape, dtype) in enumerate(parts)
            ]
        dtype = self.ours[piece.ours].dtype
        if self.dtype is not None and not (self.family.stays_fp32(piece.theirs) and self.dtype.itemsize < 4):
            dtype = self.dtype
        return [Output(piece.theirs, Stored("", piece.shape, dtype), piece, 0)]

    def write(
        self, folder: Path, shard_bytes: int = SHARD_BYTES, report: Report | None = None,
        aside: ShardReader | None = None,
    ) -> int:  # fmt: skip
        """Shards and index; returns the number of tensors. aside: further tensors to carry along unchanged."""
        by_name = {output.name: output for output in self.outputs}
        stored = {output.name: output.stored for output in self.outputs}
        if aside is not None:
            stored |= aside.tensors
        shards = plan_shards({name: entry.bytes for name, entry in stored.items()}, shard_bytes)
        total, done = sum(entry.bytes for entry in stored.values()), 0
        last: tuple[Piece, tuple[Tensor, ...]] | None = None
        for index, names in enumerate(shards):
            path = folder / shard_name(index, len(shards))
            with SafetensorsWriter(path, {n: (stored[n].shape, stored[n].dtype) for n in names}) as writer:
                for name in names:
                    if name in by_name:
                        output = by_name[name]
                        if last is None or last[0] is not output.piece:
                            last = (output.piece, self._values(output))
                        writer.write(name, last[1][output.part])
                    else:
                        assert aside is not None
                        writer.write(name, aside.read(name))
                    done += stored[name].bytes
                    if report is not None:
                        report(done, total)
        write_index(folder, shards, total)
        return len(stored)

    def _values(self, output: Output) -> tuple[Tensor, ...]:
        piece = output.piece
        value = self.read(piece.ours, piece.part)
        if self.pack is not None and ".experts." in piece.theirs:
            return pack_mxfp4(value) if self.pack == "mxfp4" else pack_int4(value)
        if piece.padded:
            padded = value.new_zeros(piece.size)
            padded[: value.numel()] = value.reshape(-1)
            value = padded
        return (value.reshape(piece.shape).to(output.stored.dtype),)


def write_config(
    folder: Path,
    family: Family,
    config: Decoder.Config,
    origin: Origin | None,
    dtype: torch.dtype,
    pack: Pack | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> bool:
    """config.json; the original one where it still describes ``config``. Returns whether it was the original.

    token_ids: ids of bos, eos and pad, for a config that is not the original.
    """
    original = origin is not None and origin.family == family.name and family.read(origin.config) == config
    if config.tied_head and not family.ties:
        config = replace(config, tied_head=False)
    published = dict(origin.config) if original and origin is not None else family.write(config)
    tables = [published]
    if isinstance(published.get("text_config"), dict):
        published["text_config"] = dict(published["text_config"])
        tables.append(published["text_config"])
    for table in tables:
        table["dtype"] = str(dtype).removeprefix("torch.")
        table.pop("torch_dtype", None)
        table.pop("quantization_config", None)
        if not original:  # explicit, because a reader's defaults may lie outside this vocabulary
            table |= {f"{name}_token_id": (token_ids or {}).get(name) for name in ("bos", "eos", "pad")}
    if pack is not None:
        published["quantization_config"] = quantization(pack)
    (folder / "config.json").write_text(json.dumps(published, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return original


def quantization(pack: Pack) -> dict[str, Any]:
    """The compressed-tensors description of packed experts."""
    kind = {"mxfp4": "float", "int4": "int"}[pack]
    weights: dict[str, Any] = {"num_bits": 4, "type": kind, "symmetric": True, "strategy": "group", "group_size": GROUP}
    if pack == "mxfp4":
        weights["scale_dtype"] = "torch.uint8"
    name = {"mxfp4": "mxfp4-pack-quantized", "int4": "pack-quantized"}[pack]
    ignore = [r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
              r"re:.*lm_head.*", r"re:.*vision_tower.*", r"re:.*mm_projector.*", r"re:.*routed_expert_.*"]  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": name}},
        "ignore": ignore,
    }


def main_dtype(ours: Mapping[str, Stored]) -> torch.dtype:
    return ours["embedding.weight"].dtype


def parse_dtype(name: str) -> torch.dtype:
    """ "bf16", "bfloat16", "fp32", "F32" ... -> the torch dtype."""
    short = {"bf16": "BF16", "bfloat16": "BF16", "fp32": "F32", "float32": "F32", "fp16": "F16", "float16": "F16"}
    return DTYPES[short.get(name, name)]
