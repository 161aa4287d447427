"""MuonClip, AdamW, QK-Clip and schedules. Works on any ``nn.Module``, ours or not. Names load on first use."""

from triscale.config.lazy import lazy_exports

_EXPORTS = {
    "OPTIMIZERS": "parts",
    "SCHEDULES": "schedules",
    "AdamW": "adamw",
    "MuonClip": "muon_clip",
    "QKClip": "qk_clip",
}

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
