"""Dotted overrides (``--model.residual.kind=block_attention``) and TOML files as one nested dict."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w

from .errors import ConfigError


def parse_value(text: str) -> Any:
    """A TOML value; anything that is not one is taken as a plain string (so quotes are optional)."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """``["--a.b=1", "--c=x"]`` -> ``{"a": {"b": 1}, "c": "x"}``; raises :class:`ConfigError` on other shapes."""
    tree: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not equals or not name:
            raise ConfigError(argument, "not an override", "Write --path.to.field=VALUE (with the equals sign)")
        set_path(tree, name, parse_value(text))
    return tree


def set_path(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``tree[a][b][c] = value`` for ``a.b.c``; a string in the way is read as a part's kind."""
    *parents, last = dotted.split(".")
    node = tree
    for key in parents:
        child = node.setdefault(key, {})
        if isinstance(child, str):
            child = node[key] = {"kind": child}
        if not isinstance(child, dict):
            raise ConfigError(dotted, f"{key!r} already holds {child!r}, which has no fields below it")
        node = child
    node[last] = value


def overlay(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``, both unchanged. A part whose ``kind`` changes drops the old kind's fields."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(value, str) and isinstance(old, dict) and "kind" in old:
            value = {"kind": value}  # shorthand
        if isinstance(old, str) and isinstance(value, dict):
            old = {"kind": old}
        if isinstance(old, dict) and isinstance(value, dict):
            changed = "kind" in value and old.get("kind") != value["kind"]
            result[key] = copy.deepcopy(value) if changed else overlay(old, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file; the error names the file and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(str(path), "no such file") from error
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(str(path), f"cannot be read ({error})") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"is not valid TOML: {error}") from error


def dump_toml(tree: dict[str, Any]) -> str:
    return tomli_w.dumps(tree)


def refuse_untrusted_kinds(tree: Any, source: str, path: str = "") -> None:
    """A kind ``module:Class`` from a file runs code; refuse it unless the user allowed it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            here = f"{path}.{key}" if path else key
            if isinstance(value, str) and ":" in value and (key == "kind" or _looks_like_import(value)):
                raise ConfigError(here, f"{value!r} in {source} imports code",
                                  "Add --trust-imports if you trust this file")  # fmt: skip
            refuse_untrusted_kinds(value, source, here)
    elif isinstance(tree, list):
        for index, item in enumerate(tree):
            refuse_untrusted_kinds(item, source, f"{path}[{index}]")


def _looks_like_import(value: str) -> bool:
    module, _, name = value.partition(":")
    return name.isidentifier() and all(piece.isidentifier() for piece in module.split("."))
