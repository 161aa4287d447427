"""Mechanisms, one per file. The kinds a configuration can name are listed in :mod:`triscale.nn.parts`."""

from triscale.config.lazy import lazy_exports

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

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
