"""Starting a run from the command line: extension, initial weights, trackers, progress and the interrupt's exit."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from triscale.config import ConfigError, TriScaleError, from_dict
from triscale.data.prepare import prepare

from .checkpoint import MARKER, complete_checkpoints
from .config import RunConfig, Settings, describe_difference, resolved
from .distributed import World
from .interrupt import Interrupted
from .loop import Trainer
from .progress import Progress
from .run_directory import RunDirectory
from .trackers import tracking


def start_run(
    settings: Settings,
    path: Path,
    *,
    extend: bool = False,
    init_from: Path | None = None,
    track: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run (or resume) and return the result; exits 130 when the user stopped it."""
    if extend:
        directory = RunDirectory(path)
        directory.read_config()
        with directory.exclusive():
            _extend(directory, settings.config)
    weights = find_weights(init_from) if init_from else None
    world = World()
    tracked = tracking(path, track or settings.runtime.track) if world.first else nullcontext()
    with tracked, Progress(f"{path.name}:") as progress:
        data = None  # several processes prepare in turn, inside the trainer
        if world.size == 1:
            data = prepare(settings.config.data, settings.runtime.cache_dir, progress.preparing)
        trainer = Trainer(
            settings.config, settings.runtime, path, listeners=(progress,), prepared=data, init_from=weights
        )
        try:
            result = trainer.train()
        except Interrupted:
            print(f"stopped; the same command resumes {path}", file=sys.stderr)
            raise SystemExit(130) from None
    return result


def find_weights(path: Path) -> Path:
    """The newest complete checkpoint of a run folder, or ``path`` itself if it is one."""
    if (path / "model.safetensors").exists() and (path / MARKER).exists():
        return path
    found = complete_checkpoints(path / "checkpoints")
    if not found:
        raise TriScaleError(
            f"{path} holds no complete checkpoint; name a run folder or one of its checkpoints (published weights "
            "become a run folder with `triscale convert`)"
        )
    return found[-1][1]


def _extend(directory: RunDirectory, config: RunConfig) -> None:
    """Let an existing run go on to more tokens; every other difference is refused as usual.

    The same number of tokens changes nothing, so that the command of an extended run resumes it.
    """
    old = from_dict(RunConfig, directory.read_config())
    if config.train.tokens < old.train.tokens:
        raise ConfigError("train.tokens", f"{config.train.tokens} is not more than the run's {old.train.tokens}")
    lengthened = replace(old, train=replace(old.train, tokens=config.train.tokens))
    wanted = replace(config, train=replace(config.train, precision=old.train.precision))
    wanted = replace(wanted, model=replace(wanted.model, vocabulary=old.model.vocabulary))
    difference = describe_difference(resolved(lengthened), resolved(wanted))
    if difference:
        raise ConfigError("--extend", "changes more than train.tokens:\n  " + "\n  ".join(difference))
    if config.train.tokens == old.train.tokens:
        return
    directory.rewrite_config(lengthened)
    (directory.path / "result.json").unlink(missing_ok=True)
