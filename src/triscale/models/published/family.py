"""What the adapter of one published model family says; the machinery around it is the same for all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from triscale.config import ConfigError, TriScaleError
from triscale.models.decoder import Decoder

from .names import Naming, Shape

Published = Mapping[str, Any]
FAMILIES = {
    "llama": "triscale.models.published.llama",
    "deepseek_v3": "triscale.models.published.deepseek_v3",
    "kimi_k25": "triscale.models.published.kimi_k25",
    "kimi_linear": "triscale.models.published.kimi_linear",
    "kimi_k3": "triscale.models.published.kimi_k3",
}


@dataclass(frozen=True)
class Family:
    """read: config.json -> our config. write: the other way, raising :class:`ConfigError` for what the family lacks.

    model_types: values of ``model_type`` in config.json. keep_fp32: published names (end of the name, as a regular
    expression) that stay fp32 in a bf16 checkpoint. a_log: published shape of the decay rates for a number of heads.
    aside: prefixes of tensors that belong to another part of the model (vision), kept but not read here.
    skipped: tensors (regular expression) a checkpoint may carry that nothing needs. ties: whether readers of the
    format share the head with the embedding; without, a tied head is written out as a tensor of its own.
    """

    name: str
    model_types: tuple[str, ...]
    naming: Naming
    read: Callable[[Published], Decoder.Config]
    write: Callable[[Decoder.Config], dict[str, Any]]
    keep_fp32: tuple[str, ...] = (r"\.e_score_correction_bias",)
    a_log: Callable[[int], Shape] | None = None
    aside: tuple[str, ...] = ()
    aside_shapes: Callable[[Published], dict[str, Shape]] | None = None
    skipped: tuple[str, ...] = field(default=(r".*\.rotary_emb\.inv_freq",))
    ties: bool = True

    def stays_fp32(self, theirs: str) -> bool:
        return any(re.search(f"(?:{pattern})$", theirs) for pattern in self.keep_fp32)

    def is_aside(self, theirs: str) -> bool:
        return theirs.startswith(self.aside) if self.aside else False

    def is_skipped(self, theirs: str) -> bool:
        return any(re.fullmatch(pattern, theirs) for pattern in self.skipped)


def load_family(name: str) -> Family:
    if name not in FAMILIES:
        raise ConfigError("family", f"no published family is called {name!r}", f"Known: {', '.join(FAMILIES)}")
    return import_module(FAMILIES[name]).FAMILY


def detect_family(published: Published) -> Family:
    """The family of a config.json, by its ``model_type``."""
    kind = published.get("model_type")
    if kind == "kimi_linear" and "attn_res_block_size" in published:
        return load_family("kimi_k3")
    for name in FAMILIES:
        family = load_family(name)
        if kind in family.model_types:
            return family
    known = sorted(t for name in FAMILIES for t in load_family(name).model_types)
    raise ConfigError("config.json: model_type", f"{kind!r} is not supported", f"Supported: {', '.join(known)}")


def family_of(config: Decoder.Config) -> Family:
    """The first family that can express ``config``; its objections otherwise."""
    problems = []
    for name in FAMILIES:
        family = load_family(name)
        try:
            family.write(config)
        except ConfigError as error:
            problems.append(f"{name}: {error}")
        else:
            return family
    raise TriScaleError("no published format can hold this model:\n  " + "\n  ".join(problems))


class Fields:
    """Reads a config.json: names the field whenever something is missing or not supported."""

    def __init__(self, values: Published, path: str = "config.json"):
        self.values, self.path = values, path

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise ConfigError(f"{self.path}: {name}", "missing")
        return self.values[name]

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a field whose value changes the architecture; absent means the first allowed value."""
        value = self.values.get(name, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{self.path}: {name}", f"{value!r} is not supported",
                              f"Supported: {', '.join(map(repr, allowed))}")  # fmt: skip

    def table(self, name: str) -> Fields:
        return Fields(self.need(name), f"{self.path}: {name}")


def refuse(path: str, problem: str, family: str, fix: str = "") -> ConfigError:
    """A part of our model that ``family`` cannot express."""
    return ConfigError(path, f"{problem} has no place in the {family} format", fix)
