"""Kimi K2.5 format: K2's language model under ``language_model.``, with a vision tower and a projector beside it."""

from __future__ import annotations

from typing import Any

from triscale.models.decoder import Decoder

from . import deepseek_v3
from .family import Family, Fields, Published
from .names import Naming
from .vision import kimi_k25_vision


def read(published: Published) -> Decoder.Config:
    return deepseek_v3.read(Fields(published).need("text_config"))


def write(config: Decoder.Config) -> dict[str, Any]:
    text = {**deepseek_v3.write(config), "model_type": "kimi_k2"}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "tie_word_embeddings": config.tied_head,
    }


FAMILY = Family(
    name="kimi_k25",
    model_types=("kimi_k25",),
    naming=Naming(prefix="language_model."),
    read=read,
    write=write,
    aside=("vision_tower.", "mm_projector."),
    aside_shapes=kimi_k25_vision,
)
