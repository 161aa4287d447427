"""What a model of a given config weighs and costs: counted on the meta device, without its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from .counting import count_parameters
from .decoder import Decoder, DecoderLayer
from .presets import Preset

CONTEXT = 4096


def describe(preset: Preset, context: int = CONTEXT, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Layers, parameters by component, cache and FLOPs of a preset.

    parameters: everything a checkpoint stores for the language model (norms, convolutions, decay rates, router biases);
    ``active`` leaves out the routed experts a token does not visit. ``vision``, where there is one: the tower and the
    projector, counted from their tensor shapes. cache: bytes in ``dtype`` (states fp32). flops_per_token: forward, at
    a training length of ``context``.
    """
    config = preset.config
    model = config.build(dtype=dtype, device="meta")
    parts = count_by_component(model, preset.a_log)
    total = sum(parts.values())
    counts = count_parameters(model)
    idle = counts["total"] - counts["active"]
    both = parts.get("embedding", 0) + parts.get("head", 0)
    specs = [cast(DecoderLayer, layer).mixer.cache_spec() for layer in model.layers]
    result: dict[str, Any] = {
        "name": preset.name,
        "title": preset.title,
        "layers": config.depth,
        "parameters": {
            "total": total,
            "without_both": total - both,
            "embedding": parts.get("embedding", 0),
            "head": parts.get("head", 0),
            "active": total - idle,
            "active_without_embedding": total - idle - parts.get("embedding", 0),
            "active_without_both": total - idle - both,
            "by_component": parts,
        },
        "cache": {
            "bytes_per_token": sum(spec.bytes_per_token(dtype) for spec in specs),
            "bytes_fixed": sum(spec.bytes_fixed(dtype) for spec in specs),
        },
        "flops_per_token": model.flops_per_token(context),
        "context": context,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if preset.family:
        result["format"] = preset.family
        result["vision"] = count_vision(preset)
        if result["vision"]:
            result["vision"]["total_with_text"] = total + sum(result["vision"].values())
    if preset.reported:
        result["reported"] = preset.reported
    if preset.notes:
        result["notes"] = list(preset.notes)
    return result


def count_vision(preset: Preset) -> dict[str, int]:
    """Parameters of the vision tower and of the projector; empty for a text model."""
    from .published import load_family
    from .published.vision import PROJECTOR, TOWER

    family = load_family(preset.family)
    if family.aside_shapes is None or "vision_config" not in preset.release:
        return {}
    shapes = family.aside_shapes(preset.release)
    count = lambda prefix: sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix))
    return {"vision_tower": count(TOWER), "projector": count(PROJECTOR)}


def count_by_component(model: Decoder, a_log: int | None = None) -> dict[str, int]:
    """{component: parameters}, persistent buffers included. a_log: stored length of a layer's decay rates."""
    counts: dict[str, int] = {}
    modules = dict(model.named_modules())
    for name, tensor in _stored(model):
        size = tensor.numel()
        if a_log is not None and name.endswith(".A_log"):
            size = a_log
        component = _component(name, modules)
        counts[component] = counts.get(component, 0) + size
    return counts


def _stored(model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        if not (model.config.tied_head and name == "head.weight"):
            yield name, tensor


def _component(name: str, modules: dict[str, nn.Module]) -> str:
    first, *rest = name.split(".")
    if first in ("embedding", "head"):
        return first
    if first == "output_residual":
        return "depth_attention"
    if first == "multi_token":
        return "multi_token_prediction"
    if first != "layers":
        return "norms"
    part, inside = rest[1], rest[2:]
    if part == "mixer":
        return _snake(type(modules[f"layers.{rest[0]}.mixer"]).__name__)
    if part.endswith("_residual"):
        return "depth_attention"
    if part.endswith("_norm"):
        return "norms"
    inner = {"gate": "router", "experts": "routed_experts", "shared_experts": "shared_experts"}
    if inside[0] in inner:
        return inner[inside[0]]
    return "latent_projections" if inside[0].startswith("routed_expert_") else "dense_feed_forward"


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def render(figures: dict[str, Any]) -> list[str]:
    """The figures for a reader."""
    p, cache = figures["parameters"], figures["cache"]
    line = lambda label, value: f"  {label:<34}{value:>22}"
    lines = [f"{figures['name']}: {figures['title']}", line("layers", figures["layers"]), "parameters"]
    lines += [line(k.replace("_", " "), f"{v:,}") for k, v in p["by_component"].items()]
    lines += [
        line("total, with embedding and head", f"{p['total']:,}"),
        line("  without both", f"{p['without_both']:,}"),
    ]
    if p["active"] != p["total"]:
        lines += [
            line("active, with embedding and head", f"{p['active']:,}"),
            line("  without the embedding", f"{p['active_without_embedding']:,}"),
            line("  without both", f"{p['active_without_both']:,}"),
        ]
    if figures.get("vision"):
        lines += ["vision (counted from its tensor shapes; not built)"]
        lines += [line(k.replace("_", " "), f"{v:,}") for k, v in figures["vision"].items()]
    if figures.get("reported"):
        lines.append(line("publisher says (total / active)", figures["reported"]))
    lines += [f"    {note}" for note in figures.get("notes", [])]
    lines += [
        f"cache ({figures['dtype']}; recurrent states fp32)",
        line("bytes per token", f"{cache['bytes_per_token']:,}"),
        line("fixed bytes per sequence", f"{cache['bytes_fixed']:,}"),
        line(f"FLOPs per token at {figures['context']:,}", f"{figures['flops_per_token']:.4g}"),
    ]
    return lines
