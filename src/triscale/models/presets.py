"""Model sizes by name: a ladder of small ones from one dial, and the published models.

The dial is a parameter count without embeddings. The ladder keeps the published aspect ratio (Kimi Linear, arXiv
2510.26692, table 2, and Attention Residuals, arXiv 2603.15031, table 2): as many heads as layers and a width of about
75 per layer, so that with 12 width^2 parameters a layer N = 12 * 75^2 * depth^3. The feed-forward width takes up the
rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

from triscale.config import ConfigError
from triscale.nn.feed_forward import SwiGLU
from triscale.nn.grouped_query_attention import GroupedQueryAttention

from .decoder import Decoder
from .published import releases

ASPECT = 75  # width per layer
SIZES = ("1M", "2M", "4M", "8M", "16M", "32M", "64M", "128M", "256M", "512M")
UNITS = {"k": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class Preset:
    """family: the published format, empty for our own sizes. release: config.json. a_log: released length of the decay
    rates where it is padded. packed: the tensors a routed expert's weight is released as, if not one. reported: the
    publisher's rounded figures. notes: what a reader should know about them."""

    name: str
    title: str
    make: Callable[[], Decoder.Config]
    family: str = ""
    release: dict[str, Any] = field(default_factory=dict)
    a_log: int | None = None
    reported: str = ""
    packed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> Decoder.Config:
        return self.make()


def sized(parameters: int, vocabulary: int = 4096) -> Decoder.Config:
    """The baseline decoder with about ``parameters`` parameters outside embedding and head.

    Raises :class:`ConfigError` below 50,000: no shape of this family is that small.
    """
    if parameters < 50_000:
        raise ConfigError("size", f"{parameters} parameters are too few", "Use 50k or more")
    depth = max(2, round((parameters / (12 * ASPECT**2)) ** (1 / 3)))
    head_dim = max(8, 8 * round((parameters / (12 * depth)) ** 0.5 / depth / 8))
    width = depth * head_dim
    left = parameters / depth - 4 * width**2 - 2 * width
    hidden = max(8, 8 * round(left / (3 * width) / 8))
    return Decoder.Config(
        width=width,
        depth=depth,
        vocabulary=vocabulary,
        mixer=GroupedQueryAttention.Config(heads=depth, head_dim=head_dim),
        feed_forward=SwiGLU.Config(hidden=hidden),
    )


def parse_size(text: str) -> int | None:
    """ "8M" -> 8000000; None if ``text`` is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMbB])", text)
    if match is None:
        return None
    unit = match[2].upper()
    return round(float(match[1]) * UNITS["k" if unit == "K" else unit])


def _published(name: str, title: str, family: str, release: dict[str, Any], **rest: Any) -> Preset:
    def make() -> Decoder.Config:
        from .published import load_family

        return load_family(family).read(release)

    return Preset(name, title, make, family, release, **rest)


@cache
def presets() -> dict[str, Preset]:
    """All named presets, small ones first."""
    small = [
        Preset(size, f"baseline, {size} parameters without embeddings", partial(sized, parse_size(size) or 0))
        for size in SIZES
    ]
    published = [
        _published(
            "moonlight-16b-a3b", "Moonlight 16B-A3B (arXiv 2502.16982)", "deepseek_v3", releases.MOONLIGHT,
            reported="15.29B / 2.24B",
            notes=("The report counts neither embedding nor head; the name 16B/3B counts both.",),
        ),
        _published(
            "kimi-linear-48b-a3b", "Kimi Linear 48B-A3B (arXiv 2510.26692)", "kimi_linear", releases.KIMI_LINEAR_48B,
            reported="48B / 3B",
        ),
        _published(
            "kimi-k2", "Kimi K2 (arXiv 2507.20534)", "deepseek_v3", releases.KIMI_K2, reported="1.04T / 32.6B",
            notes=(
                "The report's 1.04T follows another rule than this count, which has no multi-token prediction: the gap "
                "fits one such layer (about 17B).",
                "The rule behind its 32.6B is not published: with embedding and head 32.86B are active, with the head "
                "alone 31.69B, with neither 30.51B.",
            ),
        ),
        _published(
            "kimi-k2.5", "Kimi K2.5, text and vision (arXiv 2602.02276)", "kimi_k25", releases.KIMI_K25,
            notes=("Its language model is K2's.",),
        ),
        _published(
            "kimi-k3", "Kimi K3, text and vision (arXiv 2607.24653)", "kimi_k3", releases.KIMI_K3, a_log=128,
            packed=("packed", "scale"), reported="2.78T / 104.2B",
            notes=(
                "The report's active count is with the head, without the embedding.",
                "Decay rates are counted as released: 128 values a layer for 96 heads (zero-padded).",
            ),
        ),
    ]  # fmt: skip
    return {preset.name: preset for preset in [*small, *published]}


def find_preset(name: str) -> Preset:
    """A preset by name, or a size such as "12M"; raises :class:`ConfigError` naming the nearest."""
    known = presets()
    by_lower = {key.lower(): preset for key, preset in known.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    size = parse_size(name)
    if size is not None:
        return Preset(name, f"baseline, {name} parameters without embeddings", partial(sized, size))
    near = get_close_matches(name.lower(), by_lower, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}, or a size such as 12M"
    raise ConfigError("name", f"no model is called {name!r}", hint)


def released_names(preset: Preset) -> Iterator[str]:
    """Every tensor name of a release, vision included; routed experts under the names of their packed form."""
    from .published import load_family
    from .published.names import pieces
    from .published.plan import decoder_shapes

    family = load_family(preset.family)
    a_log = (preset.a_log,) if preset.a_log is not None else None
    for piece in pieces(decoder_shapes(preset.config), family.naming, a_log):
        if preset.packed and ".experts." in piece.theirs:
            yield from (f"{piece.theirs}_{part}" for part in preset.packed)
        else:
            yield piece.theirs
    if family.aside_shapes is not None and "vision_config" in preset.release:
        yield from family.aside_shapes(preset.release)
