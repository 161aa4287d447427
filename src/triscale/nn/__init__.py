"""Mechanisms, one per file. The kinds a configuration can name are listed in :mod:`triscale.nn.parts`."""

from importlib import import_module
from typing import Any

# public name -> module of this package that defines it; imported on first use
_EXPORTS = {
    "AttentionResidual": "residual",
    "BlockAttentionResidual": "residual",
    "BuildContext": "context",
    "GroupedQueryAttention": "grouped_query_attention",
    "KimiDeltaAttention": "delta_attention",
    "LatentAttention": "latent_attention",
    "MixtureOfExperts": "mixture_of_experts",
    "RMSNorm": "norm",
    "SituGLU": "situ",
    "StandardResidual": "residual",
    "SwiGLU": "feed_forward",
    "TokenBatch": "batch",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
