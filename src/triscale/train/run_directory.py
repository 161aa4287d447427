"""A run is a directory: resolved config, runtime, events, checkpoints, report."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from triscale.config import ConfigError, TriScaleError, dump_toml, from_dict, read_toml, refuse_untrusted_kinds

from .checkpoint import complete_checkpoints
from .config import RunConfig, Runtime, describe_difference, resolved

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

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


class RunBusyError(TriScaleError):
    """Another process is training the run."""


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
        """What a finished run measured; raises :class:`TriScaleError` if the file is damaged."""
        file = self.path / "result.json"
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TriScaleError(
                f"{file} is damaged ({error}); delete it and start the run again: it is measured from the last checkpoint"
            ) from error

    @property
    def cache_dir(self) -> Path:
        """The folder of prepared corpora this run used, if it is on this machine, else the usual one."""
        with suppress(OSError, ValueError, KeyError):
            known = json.loads((self.path / "runtime.json").read_text(encoding="utf-8"))["runtime"]["cache"]
            if known and Path(known).expanduser().is_dir():
                return Runtime(cache=known).cache_dir
        return Runtime().cache_dir

    def write_result(self, result: dict[str, Any]) -> None:
        write_json(self.path / "result.json", result)

    def verify(self, config: RunConfig) -> None:
        """Raise :class:`ConfigError` with the difference if the directory holds a run of another config."""
        if not (self.path / "config.toml").exists():
            return
        difference = describe_difference(self.read_config(), resolved(config))
        if difference:
            raise ConfigError(
                str(self.path),
                "holds a run with another config:\n  " + "\n  ".join(difference) + "\n",
                "Use another run folder, the old values, or --extend to train the same run for more tokens",
            )

    def open(self, config: RunConfig, runtime: Runtime) -> None:
        """Create the directory, or check that it belongs to the same config (see :meth:`verify`).

        A run that stopped before its first checkpoint has nothing to lose: its config may be corrected.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        if (self.path / "config.toml").exists() and (self.finished or complete_checkpoints(self.checkpoints)):
            self.verify(config)
        else:
            self.rewrite_config(config)
        write_json(self.path / "runtime.json", {"runtime": asdict(runtime), "environment": environment()})

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other processes of this machine out while the body runs: two writers would destroy the run.

        The system drops the lock when the process ends, however it ends. Raises :class:`RunBusyError`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "a", encoding="utf-8") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise RunBusyError(
                        f"{self.path} is being trained by another process; wait for it, or use another --run folder"
                    ) from error
            yield

    def rewrite_config(self, config: RunConfig) -> None:
        _write_text(self.path / "config.toml", dump_toml(resolved(config)))

    def read_config(self) -> dict[str, Any]:
        """The resolved tree of an existing run; raises :class:`TriScaleError` if there is none or it is damaged."""
        file = self.path / "config.toml"
        if not file.exists():
            raise TriScaleError(f"{self.path} is not a run folder (it has no config.toml)")
        return read_toml(file)

    def trusted_tree(self, trust_imports: bool = False) -> dict[str, Any]:
        """As :meth:`read_config`, safe to build from. A run folder is data someone may have sent: parts of the user's
        own, which run code, are refused without ``trust_imports`` (:class:`ConfigError`)."""
        tree = self.read_config()
        if not trust_imports:
            refuse_untrusted_kinds(tree, str(self.path / "config.toml"))
        return tree

    def config(self, trust_imports: bool = False) -> RunConfig:
        """The config of an existing run, built from its :meth:`trusted_tree`."""
        return from_dict(RunConfig, self.trusted_tree(trust_imports))


def write_json(path: Path, value: Any) -> None:
    _write_text(path, json.dumps(value, indent=1, sort_keys=True))


def _write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that a crash leaves the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
