"""A ladder as data: rungs (sizes with token budgets), arms (overrides over the baseline) and seeds."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from triscale.config import ConfigError, from_dict, overlay, read_toml, refuse_untrusted_kinds
from triscale.train.config import RunConfig

Match = Literal["parameters", "active", "flops", "none"]


@dataclass(frozen=True, kw_only=True)
class RungConfig:
    """One size. config: overrides of the run tree. match: what a solver makes equal between arms by adjusting the
    feed-forward width. budgets: multiples of ``tokens`` at which the baseline's loss is also measured, by decay
    branches from one trunk; they must contain 1."""

    name: str
    tokens: int
    match: Match = "parameters"
    budgets: tuple[float, ...] = (1.0,)
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if 1.0 not in self.budgets or min(self.budgets) <= 0:
            raise ValueError(f"budgets: {list(self.budgets)} must be positive and contain 1.0")


@dataclass(frozen=True, kw_only=True)
class ArmConfig:
    """One set of overrides over the baseline. learning_rate: as found by ``ladder tune`` on the smallest rung.

    learning_rates: by rung name, where a rung was tuned itself because a rate does not carry over to its size.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    learning_rates: dict[str, float] = field(default_factory=dict)

    def rate(self, rung: str) -> float | None:
        return self.learning_rates.get(rung, self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """The first arm is the baseline. base: overrides that every run shares. rates: the grid ``ladder tune`` tries."""

    name: str
    seeds: tuple[int, ...] = (0, 1, 2)
    base: dict[str, Any] = field(default_factory=dict)
    rungs: tuple[RungConfig, ...] = ()
    arms: tuple[ArmConfig, ...] = ()
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    tune_fraction: float = 1.0

    def __post_init__(self) -> None:
        for kind in ("rungs", "arms"):
            names = [item.name for item in getattr(self, kind)]
            if not names:
                raise ValueError(f"{kind}: at least one is needed")
            for name in names:
                if names.count(name) > 1 or not name.replace("-", "").replace("_", "").replace("+", "").isalnum():
                    raise ValueError(f"{kind}: the name {name!r} must be unique, of letters, digits, '-', '_' and '+'")
        known = {rung.name for rung in self.rungs}
        for arm in self.arms:
            if not arm.learning_rates.keys() <= known:
                raise ValueError(f"arms: learning_rates of {arm.name!r} names {sorted(arm.learning_rates.keys() - known)}, "
                                 f"which is no rung; rungs: {', '.join(sorted(known))}")  # fmt: skip
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ValueError(f"seeds: {list(self.seeds)} must be distinct and not empty")
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"rates: {list(self.rates)} must be positive and not empty")
        if not self.tune_fraction > 0:
            raise ValueError(f"tune_fraction: {self.tune_fraction} must be positive")

    @property
    def baseline(self) -> ArmConfig:
        return self.arms[0]

    def rung(self, name: str) -> RungConfig:
        return next(r for r in self.rungs if r.name == name)

    def arm(self, name: str) -> ArmConfig:
        return next(a for a in self.arms if a.name == name)

    def run_tree(self, rung: RungConfig, arm: ArmConfig, seed: int, tokens: int | None = None) -> dict[str, Any]:
        """The nested dict of one run, before matching."""
        tree = overlay(overlay(self.base, rung.config), arm.config)
        tree = overlay(tree, {"seed": seed, "train": {"tokens": tokens or rung.tokens}})
        rate = arm.rate(rung.name)
        if rate is not None:
            tree = overlay(tree, {"optimizer": {"lr": rate}})
        return tree

    def run_config(self, rung: RungConfig, arm: ArmConfig, seed: int, tokens: int | None = None) -> RunConfig:
        return from_dict(RunConfig, self.run_tree(rung, arm, seed, tokens), f"{arm.name}/{rung.name}")


def shipped_ladders() -> list[str]:
    return sorted(p.name.removesuffix(".toml") for p in resources.files("triscale").joinpath("ladders").iterdir())


def load_ladder(name: str | Path, overrides: dict[str, Any] | None = None, trust_imports: bool = False) -> LadderConfig:
    """A ladder by file, or by name if it is one of ours; raises :class:`ConfigError`.

    ``overrides`` are laid over the whole tree (for example ``{"base": {...}, "seeds": [0]}``).
    """
    if Path(name).suffix == ".toml" or Path(name).is_file():
        tree = read_toml(name)
        if not trust_imports:
            refuse_untrusted_kinds(tree, str(name))
    elif str(name) in shipped_ladders():
        tree = tomllib.loads(resources.files("triscale").joinpath("ladders", f"{name}.toml").read_text())
    else:
        raise ConfigError(str(name), "no such ladder", f"Give a TOML file or one of: {', '.join(shipped_ladders())}")
    return from_dict(LadderConfig, overlay(tree, overrides or {}), f"ladder {name}")
