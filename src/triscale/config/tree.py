"""The typed tree: frozen dataclasses built strictly from nested dicts, and printed back to them.

The rules: an unknown key is refused and the nearest one named; every value is checked against its annotation; a field
made by :func:`part` holds whichever ``kind`` the dict names, and keeps the default's values only if the kind stays the
same. ``to_dict(from_dict(cls, d))`` is the fully resolved tree and round-trips.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from functools import cache
from typing import Any, TypeVar

from .errors import ConfigError
from .parts import Parts, kind_of

T = TypeVar("T")


def from_dict(cls: type[T], values: dict[str, Any], path: str = "config") -> T:
    """Build ``cls`` from ``values``; raises :class:`ConfigError` with the dotted path of the first problem."""
    if not isinstance(values, dict):
        raise ConfigError(path, f"expected a table, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise _unknown_key(path, key, fields)
    hints = _hints(cls)  # type: ignore[arg-type]
    built = {}
    for name, field in fields.items():
        here = f"{path}.{name}"
        parts = field.metadata.get("parts")
        if name not in values:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ConfigError(here, "this field is required and missing")
            continue
        if parts is not None:
            built[name] = _build_part(parts, values[name], field, here)
        else:
            built[name] = _convert(hints[name], values[name], here)
    try:
        return cls(**built)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(path, str(error)) from error


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved tree as nested dicts of TOML values; ``None`` values are left out (TOML has none)."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if not field.init:
            continue
        value = getattr(config, field.name)
        parts = field.metadata.get("parts")
        if value is None:
            continue
        if parts is not None:
            result[field.name] = {"kind": kind_of(parts, value), **to_dict(value)}
        else:
            result[field.name] = _plain(value)
    return result


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _build_part(parts: Parts, value: Any, field: dataclasses.Field, path: str) -> Any:
    if dataclasses.is_dataclass(value):
        return value
    if isinstance(value, str):  # shorthand: mixer = "delta_attention"
        value = {"kind": value}
    if not isinstance(value, dict):
        raise ConfigError(path, f"expected a table with a 'kind', got {value!r}")
    rest = dict(value)
    kind = rest.pop("kind", None) or field.metadata.get("default_kind")
    if kind is None:
        raise ConfigError(f"{path}.kind", "missing", f"Known: {', '.join(sorted(parts.kinds))}")
    return from_dict(parts.config_class(kind, path), rest, path)


def _unknown_key(path: str, key: str, fields: dict) -> ConfigError:
    near = difflib.get_close_matches(key, fields, 1, 0.5)
    fix = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(fields) or 'none'}"
    return ConfigError(f"{path}.{key}", "unknown key", fix)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Check ``value`` against an annotation; int widens to float, lists become tuples, nothing else is coerced."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, path)
    if origin is typing.Literal:
        if value in args and any(type(value) is type(a) for a in args):
            return value
        near = difflib.get_close_matches(str(value), [str(a) for a in args], 1, 0.4)
        fix = (f"Did you mean {near[0]!r}? " if near else "") + f"Allowed: {', '.join(map(repr, args))}"
        raise ConfigError(path, f"{value!r} is not allowed", fix)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_dict(hint, value, path)
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(path, f"expected a list, got {value!r}")
        inner = args[0] if args else Any
        items = [_convert(inner, item, f"{path}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(path, f"expected a table, got {value!r}")
        return {k: _convert(args[1], v, f"{path}.{k}") for k, v in value.items()} if args else dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool):
        if type(value) is not hint:
            raise ConfigError(path, f"expected {hint.__name__}, got {value!r}")
        return value
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    if hint is dict:
        raise ConfigError(path, f"expected a table, got {value!r}")
    return value


def _convert_union(args: tuple, value: Any, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    problems = []
    for option in args:
        if option is type(None):
            continue
        try:
            return _convert(option, value, path)
        except ConfigError as error:
            problems.append(error)
    raise problems[0]
