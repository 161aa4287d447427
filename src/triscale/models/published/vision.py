"""The tensors of the published vision towers and projectors, from ``vision_config``: names and shapes, no computation.

MoonViT-3D (Kimi K2.5): LayerNorm and biases throughout, projector with the norm before the merge. MoonViT-V2 (Kimi
K3): RMSNorm, no biases, heads wider than the hidden size, projector with the norm behind it.
"""

from __future__ import annotations

from .family import Fields, Published
from .names import Shape

TOWER, PROJECTOR = "vision_tower.", "mm_projector."


def kimi_k25_vision(published: Published) -> dict[str, Shape]:
    return _tensors(Fields(published).table("vision_config"), biases=True)


def kimi_k3_vision(published: Published) -> dict[str, Shape]:
    return _tensors(Fields(published).table("vision_config"), biases=False)


def _tensors(fields: Fields, biases: bool) -> dict[str, Shape]:
    width, inner = fields.need("vt_hidden_size"), fields.need("vt_intermediate_size")
    heads = fields.get("qkv_hidden_size", width)
    patch, merge = fields.get("patch_size", 14), fields.get("merge_kernel_size", [2, 2])
    table = (fields.need("init_pos_emb_height"), fields.need("init_pos_emb_width"), width)
    merged = width * merge[0] * merge[1]
    text = fields.need("text_hidden_size")
    weights: dict[str, Shape] = {
        f"{TOWER}patch_embed.proj": (width, 3, patch, patch),
        f"{TOWER}patch_embed.pos_emb": table,
    }
    for layer in range(fields.need("vt_num_hidden_layers")):
        block = f"{TOWER}encoder.blocks.{layer}."
        weights |= {
            f"{block}norm0": (width,),
            f"{block}norm1": (width,),
            f"{block}wqkv": (3 * heads, width),
            f"{block}wo": (width, heads),
            f"{block}mlp.fc0": (inner, width),
            f"{block}mlp.fc1": (width, inner),
        }
    weights[f"{TOWER}encoder.final_layernorm"] = (width,)
    weights |= {f"{PROJECTOR}proj.0": (merged, merged), f"{PROJECTOR}proj.2": (text, merged)}
    weights[f"{PROJECTOR}pre_norm" if biases else f"{PROJECTOR}post_norm"] = (width,) if biases else (text,)
    tensors = {f"{name}.weight": shape for name, shape in weights.items()}
    if biases:
        tensors |= {f"{n}.bias": shape[:1] for n, shape in weights.items() if not n.endswith("pos_emb")}
    return tensors
