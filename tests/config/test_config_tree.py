"""The config layer: strict, typed, round-tripping."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triscale.config import (
    ConfigError,
    Parts,
    dump_toml,
    from_dict,
    overlay,
    parse_overrides,
    part,
    refuse_untrusted_kinds,
    to_dict,
)


class Square:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        side: float = 1.0


class Circle:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        radius: int = 2
        name: str | None = None

        def __post_init__(self):
            if self.radius < 0:
                raise ValueError(f"radius: {self.radius} must not be negative")


HERE = __name__
SHAPES = Parts("shape", {"square": f"{HERE}:Square", "circle": f"{HERE}:Circle"})


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int = 1
    flags: tuple[bool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tree:
    shape: Any = part(SHAPES, "square")
    inner: Inner = field(default_factory=Inner)
    mode: Literal["fast", "slow"] = "fast"
    table: dict[str, Any] = field(default_factory=dict)


def test_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"config\.inner\.cuont: unknown key\. Did you mean 'count'"):
        from_dict(Tree, {"inner": {"cuont": 3}})


def test_unknown_kind_names_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean 'circle'"):
        from_dict(Tree, {"shape": {"kind": "circel"}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"count": 1.5}}, r"inner\.count: expected int, got 1\.5"),
        ({"inner": {"count": True}}, r"inner\.count: expected int"),
        ({"inner": {"flags": [1]}}, r"inner\.flags\[0\]: expected bool"),
        ({"mode": "fsat"}, r"mode: 'fsat' is not allowed\. Did you mean 'fast'"),
        ({"shape": 3}, "expected a table with a 'kind'"),
        ({"shape": {"kind": "circle", "radius": -1}}, r"shape: radius: -1 must not be negative"),
        ({"inner": 5}, "expected a table"),
    ],
)
def test_wrong_values_are_refused_with_their_path(values, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(Tree, values)


def test_integers_widen_to_floats_and_kind_may_be_a_bare_string():
    tree = from_dict(Tree, {"shape": {"kind": "square", "side": 2}})
    assert tree.shape.side == 2.0 and isinstance(tree.shape.side, float)
    assert from_dict(Tree, {"shape": "circle"}).shape == Circle.Config()


def test_own_part_by_import_path():
    tree = from_dict(Tree, {"shape": {"kind": f"{HERE}:Circle", "radius": 5}})
    assert tree.shape.radius == 5
    with pytest.raises(ConfigError, match="no class 'Missing'"):
        from_dict(Tree, {"shape": {"kind": f"{HERE}:Missing"}})
    with pytest.raises(ConfigError, match="cannot import 'no_such_module'"):
        from_dict(Tree, {"shape": {"kind": "no_such_module:X"}})


def test_changing_the_kind_drops_the_old_kinds_fields():
    merged = overlay({"shape": {"kind": "square", "side": 3.0}}, parse_overrides(["--shape.kind=circle"]))
    assert from_dict(Tree, merged).shape == Circle.Config()
    merged = overlay({"shape": {"kind": "square", "side": 3.0}}, parse_overrides(["--shape.side=4"]))
    assert from_dict(Tree, merged).shape.side == 4.0
    assert overlay({"shape": "circle"}, parse_overrides(["--shape.radius=4"])) == {
        "shape": {"kind": "circle", "radius": 4}
    }


def test_imports_in_files_need_trust():
    with pytest.raises(ConfigError, match="--trust-imports"):
        refuse_untrusted_kinds({"model": {"mixer": {"kind": "evil.module:Thing"}}}, "run.toml")
    with pytest.raises(ConfigError, match="--trust-imports"):
        refuse_untrusted_kinds({"model": {"mixer": "evil.module:Thing"}}, "run.toml")
    refuse_untrusted_kinds({"model": {"mixer": {"kind": "hybrid", "pattern": "3:1"}}}, "run.toml")


def test_overrides_need_an_equals_sign():
    with pytest.raises(ConfigError, match="equals sign"):
        parse_overrides(["--a.b", "3"])
    with pytest.raises(ConfigError, match="already holds 1"):
        parse_overrides(["--a=1", "--a.b=2"])


shapes = st.one_of(
    st.builds(lambda s: {"kind": "square", "side": s}, st.floats(-1e6, 1e6)),
    st.builds(lambda r, n: {"kind": "circle", "radius": r, "name": n}, st.integers(0, 99), st.text(max_size=5)),
)
trees = st.fixed_dictionaries(
    {},
    optional={
        "shape": shapes,
        "mode": st.sampled_from(["fast", "slow"]),
        "inner": st.fixed_dictionaries(
            {}, optional={"count": st.integers(-9, 9), "flags": st.lists(st.booleans(), max_size=3)}
        ),
        "table": st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 5), max_size=2),
    },
)


@given(trees)
def test_resolved_tree_round_trips_through_toml(values):
    tree = from_dict(Tree, values)
    text = dump_toml(to_dict(tree))
    assert from_dict(Tree, tomllib.loads(text)) == tree
    assert to_dict(from_dict(Tree, to_dict(tree))) == to_dict(tree)


leaves = st.one_of(st.integers(-99, 99), st.booleans(), st.floats(-10, 10), st.text("xyz", min_size=1, max_size=4))
paths = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3).map(".".join)


@given(st.dictionaries(paths, leaves, max_size=5))
def test_overrides_say_what_they_wrote(values):
    keys = sorted(values)
    if any(b.startswith(a + ".") for a in keys for b in keys):
        return
    arguments = [f"--{key}={dump_toml({'v': values[key]}).split('=', 1)[1].strip()}" for key in keys]
    tree = parse_overrides(arguments)
    for key in keys:
        node = tree
        for piece in key.split("."):
            node = node[piece]
        assert node == values[key]
