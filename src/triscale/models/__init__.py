"""Decoders, their cache, sizes and published formats."""

from triscale.config.lazy import lazy_exports

_EXPORTS = {
    "Decoder": "decoder",
    "DecoderCache": "cache",
    "LayerCache": "cache",
    "from_published": "published",
    "to_published": "published",
    "count_parameters": "counting",
}

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
