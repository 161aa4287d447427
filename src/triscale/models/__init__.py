"""Decoders, their cache, sizes and published formats."""

from importlib import import_module

_EXPORTS = {
    "Decoder": "triscale.models.decoder",
    "DecoderCache": "triscale.models.cache",
    "LayerCache": "triscale.models.cache",
    "from_published": "triscale.models.published",
    "to_published": "triscale.models.published",
    "count_parameters": "triscale.models.counting",
}


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'triscale.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
