"""Everything that decides a run's result (``RunConfig``), and everything that must not (``Runtime``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from triscale.config import (
    ConfigError,
    from_dict,
    overlay,
    parse_overrides,
    part,
    read_toml,
    refuse_untrusted_kinds,
    to_dict,
)
from triscale.data.prepare import DataConfig
from triscale.models.decoder import Decoder
from triscale.optim.parts import OPTIMIZERS
from triscale.optim.schedules import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """tokens: training budget. batch_tokens: tokens an optimizer step. row_length: tokens a row (the context).

    micro_batch_tokens: tokens a forward pass; several make a step. grad_clip 0 = off. precision "auto" takes bf16
    autocast where the device has fast bf16, else fp32. eval_every: steps between held-out evaluations (0 = only at
    the end). eval_tokens: size of the held-out sample.
    """

    tokens: int = 1_000_000
    batch_tokens: int = 8192
    row_length: int = 512
    micro_batch_tokens: int = 4096
    grad_clip: float = 1.0
    precision: Literal["auto", "bf16", "fp32", "fp16"] = "auto"
    eval_every: int = 0
    eval_tokens: int = 65536

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_tokens", "row_length", "micro_batch_tokens", "eval_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.precision == "fp16":
            raise ValueError(
                "precision: 'fp16' is not offered: hundreds of times slower than bf16 on a CPU, and it needs loss "
                "scaling elsewhere; use bf16 or fp32"
            )
        if self.batch_tokens % self.row_length:
            raise ValueError(f"batch_tokens: {self.batch_tokens} must be a multiple of row_length ({self.row_length})")
        if self.eval_every < 0:
            raise ValueError(f"eval_every: {self.eval_every} must not be negative (0 = only at the end)")
        if not self.grad_clip >= 0:
            raise ValueError(f"grad_clip: {self.grad_clip} must not be negative (0 = off)")

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / self.batch_tokens))

    @property
    def rows(self) -> int:
        """Rows a step."""
        return self.batch_tokens // self.row_length

    @property
    def micro_rows(self) -> int:
        return max(1, self.micro_batch_tokens // self.row_length)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole run: the same tree gives the same numbers."""

    seed: int = 0
    model: Decoder.Config = field(default_factory=Decoder.Config)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: Any = part(OPTIMIZERS, "adamw")
    schedule: Any = part(SCHEDULES, "wsd")
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: {self.seed} must lie between 0 and 2**32 - 1")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how a run executes; may change between sittings.

    checkpoint_every: steps between checkpoints (0 = by time only); checkpoint_seconds: the same in seconds. keep: how
    many of the newest checkpoints stay. log_logits_every: steps between measurements of the attention logits when no
    optimizer clips them (with QK-Clip every step is measured), 0 = never. threads 0 = torch's default. cache: folder for
    prepared corpora. expert_parallel: with several processes, each keeps a share of the experts whole and tokens travel
    to them, instead of every process gathering every expert.
    """

    device: str = "auto"
    threads: int = 0
    checkpoint_every: int = 0
    checkpoint_seconds: float = 120.0
    keep: int = 2
    log_every: int = 1
    log_logits_every: int = 50
    compile: bool = False
    expert_parallel: bool = False
    cache: str = ""
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("threads", 0), ("checkpoint_every", 0), ("keep", 1), ("log_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least {least}")
        if not self.checkpoint_seconds > 0:
            raise ValueError(f"checkpoint_seconds: {self.checkpoint_seconds} must be positive")

    @property
    def cache_dir(self) -> Path:
        return Path(self.cache).expanduser() if self.cache else Path.home() / ".cache" / "triscale"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line resolves: both trees, and what the user wrote."""

    config: RunConfig
    runtime: Runtime


def load_settings(
    file: str | Path | None = None,
    overrides: list[str] | tuple[str, ...] = (),
    base: dict[str, Any] | None = None,
    trust_imports: bool = False,
) -> Settings:
    """Lay ``overrides`` over ``file`` over ``base``; ``runtime.*`` goes to the runtime tree.

    Raises :class:`ConfigError` for unknown keys (the nearest is named), wrong types, and imports a file asks for
    without ``trust_imports``.
    """
    tree = dict(base or {})
    if file is not None:
        written = read_toml(file)
        if not trust_imports:
            refuse_untrusted_kinds(written, str(file))
        tree = overlay(tree, written)
    tree = overlay(tree, parse_overrides(overrides))
    runtime = tree.pop("runtime", {})
    if not isinstance(runtime, dict):
        raise ConfigError("runtime", f"expected a table, got {runtime!r}")
    return Settings(config=from_dict(RunConfig, tree), runtime=from_dict(Runtime, runtime, "runtime"))


def resolved(config: RunConfig) -> dict[str, Any]:
    """The resolved tree as written to a run's ``config.toml``."""
    return to_dict(config)


def describe_difference(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """Lines ``path: old -> new`` for every leaf that differs."""
    lines = []
    for key in sorted({*old, *new}):
        here = f"{path}.{key}" if path else key
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += describe_difference(a, b, here)
        elif a != b:
            lines.append(f"{here}: {a!r} -> {b!r}")
    return lines
