"""MuonClip, AdamW, QK-Clip and schedules. Works on any ``nn.Module``, ours or not. Names load on first use."""

from importlib import import_module

_EXPORTS = {
    "OPTIMIZERS": "parts",
    "SCHEDULES": "schedules",
    "AdamW": "adamw",
    "MuonClip": "muon_clip",
    "QKClip": "qk_clip",
}


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
