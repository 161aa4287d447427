"""Swappable parts: a config field that holds one of several kinds.

``Parts`` maps a short kind to the import path of the class that owns the nested ``Config``. The class is imported
only when its kind is used. A kind of the form ``package.module:Class`` brings a user's own part.
"""

from __future__ import annotations

import dataclasses
import difflib
from importlib import import_module
from typing import Any

from .errors import ConfigError


class Parts:
    """The kinds one config field accepts, for example all token mixers."""

    def __init__(self, name: str, kinds: dict[str, str]):
        self.name, self.kinds = name, dict(kinds)

    def config_class(self, kind: str, path: str) -> type:
        """The ``Config`` dataclass behind ``kind``; raises :class:`ConfigError` naming the nearest kind."""
        if not isinstance(kind, str):
            raise ConfigError(
                f"{path}.kind", f"expected a name, got {kind!r}", f"Known: {', '.join(sorted(self.kinds))}"
            )
        target = kind if ":" in kind else self.kinds.get(kind)
        if target is None:
            near = difflib.get_close_matches(kind, self.kinds, 1, 0.4)
            fix = f"Did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{path}.kind",
                f"no {self.name} is called {kind!r}",
                f"{fix}Known: {', '.join(sorted(self.kinds))}, or your own as 'package.module:Class'",
            )
        return _load(target, path).Config

    def __repr__(self) -> str:
        return f"Parts({self.name!r})"


def _load(target: str, path: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        owner = getattr(import_module(module_name), attribute)
    except (ModuleNotFoundError, TypeError, ValueError) as error:  # the latter two: not a module's name at all
        raise ConfigError(f"{path}.kind", f"cannot import {module_name!r} ({error})",
                          "Check the spelling, and that the folder is on PYTHONPATH") from error  # fmt: skip
    except AttributeError as error:
        raise ConfigError(f"{path}.kind", f"module {module_name!r} has no class {attribute!r}") from error
    config = getattr(owner, "Config", None)
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise ConfigError(f"{path}.kind", f"{target} has no nested dataclass named Config",
                          "Give the class a frozen keyword-only dataclass `Config` with a build() method")  # fmt: skip
    return owner


def part(parts: Parts, default: str | None = None, **defaults: Any) -> Any:
    """A dataclass field that holds one of ``parts``; ``default`` is a kind, ``defaults`` its values."""

    def make() -> Any:
        return parts.config_class(default, parts.name)(**defaults)  # type: ignore[arg-type]

    if default is None:
        return dataclasses.field(metadata={"parts": parts})
    return dataclasses.field(default_factory=make, metadata={"parts": parts, "default_kind": default})


def kind_of(parts: Parts, config: Any) -> str:
    """The kind string that leads back to ``config``'s class: short for our own, an import path otherwise."""
    cls = type(config)
    owner = f"{cls.__module__}:{cls.__qualname__.removesuffix('.Config')}"
    for kind, target in parts.kinds.items():
        same_name = target.partition(":")[2] + ".Config" == cls.__qualname__
        if target == owner or (same_name and parts.config_class(kind, parts.name) is cls):
            return kind
    return owner
