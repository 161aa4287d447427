"""A run is a directory: resolved config, runtime, events, checkpoints, report."""

from __future__ import annotations

import json
import os
import platform
import tomllib
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from triscale.config import ConfigError, TriScaleError, dump_toml

from .config import RunConfig, Runtime, describe_difference, resolved

PACKAGES = ("triscale", "torch", "numpy", "scipy", "tokenizers", "safetensors")


def environment() -> dict[str, Any]:
    """What a number must be quoted with: Python, packages, processor, threads."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


class RunDirectory:
    """Paths and identity of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.events = self.path / "events.jsonl"
        self.report = self.path / "report"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    def result(self) -> dict[str, Any]:
        return json.loads((self.path / "result.json").read_text())

    def write_result(self, result: dict[str, Any]) -> None:
        write_json(self.path / "result.json", result)

    def open(self, config: RunConfig, runtime: Runtime) -> None:
        """Create the directory, or check that it belongs to the same config.

        Raises :class:`ConfigError` with the difference when the directory holds a run of another config.
        """
        tree = resolved(config)
        file = self.path / "config.toml"
        if file.exists():
            difference = describe_difference(tomllib.loads(file.read_text()), tree)
            if difference:
                raise ConfigError(
                    str(self.path),
                    "holds a run with another config:\n  " + "\n  ".join(difference) + "\n",
                    "Use another run folder, the old values, or --extend to train the same run for more tokens",
                )
        else:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.checkpoints.mkdir(exist_ok=True)
                _write_text(file, dump_toml(tree))
            except OSError as error:
                raise TriScaleError(f"cannot write to the run folder {self.path}: {error}") from error
        write_json(self.path / "runtime.json", {"runtime": asdict(runtime), "environment": environment()})

    def rewrite_config(self, config: RunConfig) -> None:
        _write_text(self.path / "config.toml", dump_toml(resolved(config)))

    def read_config(self) -> dict[str, Any]:
        """The resolved tree of an existing run; raises :class:`TriScaleError` if there is none."""
        file = self.path / "config.toml"
        if not file.exists():
            raise TriScaleError(f"{self.path} is not a run folder (it has no config.toml)")
        return tomllib.loads(file.read_text())


def write_json(path: Path, value: Any) -> None:
    _write_text(path, json.dumps(value, indent=1, sort_keys=True))


def _write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that a crash leaves the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
