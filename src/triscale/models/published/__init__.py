"""The publishers' own formats: config.json and safetensors under their names, in and out.

One file per family says how its config maps to ours (:mod:`.llama`, :mod:`.deepseek_v3`, :mod:`.kimi_linear`,
:mod:`.kimi_k3`, :mod:`.kimi_k25`); names, packing, planning and streaming are shared.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from triscale.models.decoder import Decoder

from .family import FAMILIES, Family, detect_family, family_of, load_family
from .plan import Origin, plan_import, read_config
from .shards import ShardReader, Stored
from .stream import SHARD_BYTES, Exporter, Pack, fill, write_config

__all__ = [
    "FAMILIES",
    "Family",
    "Origin",
    "detect_family",
    "family_of",
    "from_published",
    "load_family",
    "read_config",
    "to_published",
]


def from_published(folder: str | Path, dtype: torch.dtype | None = torch.float32) -> Decoder:
    """A decoder in eval mode from a published folder; ``model(input_ids [B, T])`` gives logits [B, T, V].

    dtype: of the model; tensors the family keeps in fp32 stay fp32 in a bf16 model. None = bf16 if the embedding is.
    Packed weights are unpacked. Vision tensors are checked and left out. Raises :class:`TriScaleError` listing missing
    and left-over tensors, :class:`ConfigError` for what is not supported.
    """
    published = read_config(folder)
    with ShardReader(folder) as reader:
        plan = plan_import(published, reader)
        if dtype is None:
            embedding = next(s.names[0] for s in plan.sources if s.piece.ours == "embedding.weight")
            dtype = reader.tensors[embedding].dtype
        model = plan.config.build(seed=None, dtype=dtype)
        _keep_dtypes(model, plan, dtype)
        fill(model, plan, reader)
    model.origin = plan.origin  # type: ignore[assignment]
    return model.eval()


def _keep_dtypes(model: Decoder, plan: Any, dtype: torch.dtype) -> None:
    """fp32 parameters of a bf16 model; an fp64 model is fp64 throughout (its constants too)."""
    if dtype == torch.float64:
        model.double()
    if dtype.itemsize >= 4:
        return
    names = {s.piece.ours for s in plan.sources if plan.family.stays_fp32(s.piece.theirs)}
    for name in names:
        with suppress(AttributeError):  # a buffer
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.float()


def to_published(
    model: Decoder,
    folder: str | Path,
    family: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    pack: Pack | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write ``model`` as config.json and safetensors shards; returns the folder.

    family: one of :data:`FAMILIES`; None = the one it was read from, else the first that can hold it. dtype: of all
    tensors but those the family keeps in fp32; None = the model's. A multi-token prediction layer is left out. pack: pack routed experts (K3's or K2.5's form).
    Raises :class:`ConfigError` naming the part the family has no place for.
    """
    origin: Origin | None = getattr(model, "origin", None)
    name = family or (origin.family if origin is not None else "")
    chosen = load_family(name) if name else family_of(model.config)
    chosen.write(model.config)  # refuse before writing anything
    state = model.state_dict()
    if model.config.tied_head:
        state.pop("head.weight", None)
    ours = {name: Stored("", tuple(t.shape), t.dtype) for name, t in state.items()}
    a_log = origin.a_log if origin is not None and origin.family == chosen.name else None
    exporter = Exporter(
        chosen, ours, lambda name, part: state[name][part].detach().cpu(),
        a_log=a_log, dtype=dtype, pack=pack, tied=model.config.tied_head,
    )  # fmt: skip
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    exporter.write(target, shard_bytes)
    write_config(target, chosen, model.config, origin, dtype or ours["embedding.weight"].dtype, pack)
    return target
