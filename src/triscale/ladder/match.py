"""Comparable arms: adjust the feed-forward width until an arm is as large (or as costly) as the baseline."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from triscale.config import ConfigError
from triscale.models import count_parameters
from triscale.models.decoder import Decoder

from .config import Match

STEP = 4  # feed-forward widths are multiples of this
WIDEST = 1 << 22  # no feed-forward layer is wider: the search gives up


@dataclass(frozen=True)
class Matched:
    """The adjusted model and how far it is from the target (relative)."""

    model: Decoder.Config
    mismatch: float


def measure(model: Decoder.Config, match: Match, context_length: int) -> int:
    """The quantity a rung matches, counted on the meta device."""
    built = model.build(seed=None, device="meta")
    if match == "flops":
        return built.flops_per_token(context_length)
    counts = count_parameters(built)
    return counts["active"] if match == "active" else counts["total"]


def match_model(model: Decoder.Config, target: Decoder.Config, match: Match, context_length: int) -> Matched:
    """``model`` with the feed-forward width that brings it closest to ``target``.

    Raises :class:`ConfigError` if its feed-forward layer has no ``hidden`` width to adjust and the two differ by more
    than 2 %.
    """
    wanted = measure(target, match, context_length) if match != "none" else 0
    current = measure(model, match, context_length) if match != "none" else 0
    if match == "none" or current == wanted:
        return Matched(model, 0.0)
    if "hidden" not in {f.name for f in fields(model.feed_forward)}:
        mismatch = current / wanted - 1
        if abs(mismatch) > 0.02:
            raise ConfigError(
                "model.feed_forward",
                f"has no `hidden` width, so it cannot be matched in {match} ({mismatch:+.1%})",
                'Give its Config a field `hidden`, or set match = "none" on the rung',
            )
        return Matched(model, mismatch)

    def with_hidden(hidden: int) -> Decoder.Config:
        return replace(model, feed_forward=replace(model.feed_forward, hidden=hidden))

    low, high = STEP, STEP
    while measure(with_hidden(high), match, context_length) < wanted:
        low, high = high, high * 2
        if high > WIDEST:
            raise ConfigError("model.feed_forward.hidden", f"does not change the {match}, so it cannot match them",
                              'Let the layer use its `hidden`, or set match = "none" on the rung')  # fmt: skip
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        if measure(with_hidden(middle), match, context_length) < wanted:
            low = middle
        else:
            high = middle
    error = {h: abs(measure(with_hidden(h), match, context_length) - wanted) for h in (low, high)}
    best = min(error, key=lambda h: error[h])
    mismatch = measure(with_hidden(best), match, context_length) / wanted - 1
    if abs(mismatch) > 0.25:
        raise ConfigError(
            "model", f"cannot be matched in {match}: even a feed-forward width of {best} leaves {mismatch:+.0%}"
        )
    return Matched(with_hidden(best), mismatch)
