"""Typed configuration, parameter roles and user-facing errors. Imports nothing else of TriScale, and no torch."""

from .errors import ConfigError, MissingExtraError, TriScaleError
from .extras import require
from .overrides import dump_toml, overlay, parse_overrides, read_toml, refuse_untrusted_kinds, set_path
from .parts import Parts, kind_of, part
from .roles import ClipRows, Role
from .tree import from_dict, to_dict

__all__ = [
    "ClipRows", "ConfigError", "MissingExtraError", "Parts", "Role", "TriScaleError", "dump_toml", "from_dict",
    "kind_of", "overlay", "parse_overrides", "part", "read_toml", "refuse_untrusted_kinds", "require", "set_path",
    "to_dict",
]  # fmt: skip
