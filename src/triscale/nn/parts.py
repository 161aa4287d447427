"""The kinds a decoder is assembled from, and where each is defined."""

from triscale.config import Parts

MIXERS = Parts(
    "mixer",
    {
        "grouped_query_attention": "triscale.nn.grouped_query_attention:GroupedQueryAttention",
        "latent_attention": "triscale.nn.latent_attention:LatentAttention",
        "delta_attention": "triscale.nn.delta_attention:KimiDeltaAttention",
        "lstm": "triscale.nn.lstm:LSTM",
        "hybrid": "triscale.nn.hybrid:Hybrid",
    },
)
FEED_FORWARDS = Parts(
    "feed-forward",
    {
        "swiglu": "triscale.nn.feed_forward:SwiGLU",
        "situ_glu": "triscale.nn.situ:SituGLU",
        "mixture_of_experts": "triscale.nn.mixture_of_experts:MixtureOfExperts",
    },
)
RESIDUALS = Parts(
    "residual connection",
    {
        "standard": "triscale.nn.residual:StandardResidual",
        "attention": "triscale.nn.residual:AttentionResidual",
        "block_attention": "triscale.nn.residual:BlockAttentionResidual",
    },
)

BALANCES = Parts(
    "expert balancing rule",
    {
        "none": "triscale.nn.balancing:NoBalance",
        "sign": "triscale.nn.balancing:SignBalance",
        "quantile": "triscale.nn.balancing:QuantileBalance",
    },
)
