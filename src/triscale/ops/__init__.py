"""Operators: pure functions of tensors. Each file holds the definition of one operator and its fast forms."""

from triscale.config.lazy import lazy_exports

_EXPORTS = {
    "max_logits": "logit_maxima",
    "causal_short_convolution": "short_convolution",
    "gated_delta_rule": "delta_rule.dispatch",
    "context_parallel_gated_delta_rule": "delta_rule.context_parallel",
    "gated_delta_rule_by_segments": "delta_rule.segments",
    "gated_delta_rule_step": "delta_rule.step",
    "segment_map": "delta_rule.segments",
    "to_unit_length": "unit_length",
    "mix_over_depth": "depth_attention",
    "orthogonalize": "newton_schulz",
    "quantile_bias": "routing",
    "route": "routing",
}

__all__ = sorted(_EXPORTS)

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
