"""Starting a run from the command line: extension, initial weights, trackers, progress and the interrupt's exit."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from triscale.config import ConfigError, TriScaleError, overlay
from triscale.data.prepare import PreparedData, prepare

from .checkpoint import complete_checkpoints, is_checkpoint
from .config import RunConfig, Settings, describe_difference, resolved
from .device import resolve_device
from .distributed import World
from .interrupt import Interrupted
from .loop import Listener, Trainer
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
    """Run (or resume) and return the result; exits 130 when the user stopped it.

    Under ``torchrun`` every rank calls this; only the first one prints, tracks and writes the run's files.
    """
    world = World()
    world.share(settings.config.train.rows)
    world.join(resolve_device(settings.runtime.device))
    try:
        if extend:
            with world.in_turn():
                if world.first:
                    extend_run(RunDirectory(path), settings.config)
        weights = find_weights(init_from) if init_from else None
        if not world.first:
            with world.in_turn():
                data = prepare(settings.config.data, settings.runtime.cache_dir)
            return _train(settings, path, data, (), weights)
        with tracking(path, track or settings.runtime.track), Progress(f"{path.name}:") as progress:
            with world.in_turn():
                data = prepare(settings.config.data, settings.runtime.cache_dir, progress.preparing)
            return _train(settings, path, data, (progress,), weights)
    except Interrupted:
        if world.first:
            print(f"stopped; the same command resumes {path}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        world.leave()


def _train(
    settings: Settings, path: Path, data: PreparedData, listeners: tuple[Listener, ...], weights: Path | None
) -> dict[str, Any]:
    trunk = decay_start(settings.config)
    keep = () if trunk is None else (trunk,)
    return Trainer(
        settings.config, settings.runtime, path, listeners=listeners, prepared=data, keep_steps=keep, init_from=weights
    ).train()


def find_weights(path: Path) -> Path:
    """The newest complete checkpoint of a run folder, or ``path`` itself if it is one."""
    if is_checkpoint(path):
        return path
    found = complete_checkpoints(path / "checkpoints")
    if not found:
        raise TriScaleError(
            f"{path} holds no complete checkpoint; name a run folder or one of its checkpoints (published weights "
            "become a run folder with `triscale convert`)"
        )
    return found[-1][1]


def decay_start(config: RunConfig) -> int | None:
    """The last step whose weights no decaying rate has touched (WSD); None for schedules without such a point."""
    schedule = config.schedule.build(config.train.steps)
    start = getattr(schedule, "decay_start", None)
    return None if start is None else int(start + 0.5)  # step k, from 0, has the rate at k + 0.5


def extend_run(directory: RunDirectory, config: RunConfig) -> None:
    """Let an existing run go on to more tokens; every other difference is refused as usual.

    The same number of tokens changes nothing, so that the command of an extended run resumes it. What was trained with
    a decaying rate (WSD) is no trunk for more: the run goes back to its last checkpoint before the decay, and later ones
    move to ``checkpoints/before_extension``. Raises :class:`ConfigError` if no such checkpoint was kept.
    """
    tree = directory.read_config()
    if "train" not in tree:
        raise ConfigError("--extend", f"{directory.path} holds imported weights, which no run of ours has trained",
                          "Start a run from them with --init-from")  # fmt: skip
    with directory.exclusive():
        old = tree["train"]["tokens"]
        if config.train.tokens < old:
            raise ConfigError("train.tokens", f"{config.train.tokens} is not more than the run's {old}")
        lengthened = overlay(tree, {"train": {"tokens": config.train.tokens}})
        config = replace(config, train=replace(config.train, precision=tree["train"]["precision"]))
        config = replace(config, model=replace(config.model, vocabulary=tree["model"].get("vocabulary")))
        difference = describe_difference(lengthened, resolved(config))
        if difference:
            raise ConfigError("--extend", "changes more than train.tokens:\n  " + "\n  ".join(difference))
        if config.train.tokens == old:
            return
        _back_to_the_trunk(directory, replace(config, train=replace(config.train, tokens=old)))
        directory.rewrite_config(config)
        (directory.path / "result.json").unlink(missing_ok=True)


def _back_to_the_trunk(directory: RunDirectory, old: RunConfig) -> None:
    trunk, found = decay_start(old), complete_checkpoints(directory.checkpoints)
    if trunk is None or not found or found[-1][0] <= trunk:
        return
    if found[0][0] > trunk:
        kept = ", ".join(str(step) for step, _ in found)
        raise ConfigError(
            "--extend",
            f"{directory.path} keeps no checkpoint from before its learning rate began to decay, after step {trunk} "
            f"(only of step {kept}): more training at the full rate would undo the decay",
            "Train a new run with the larger train.tokens, or start one from these weights with --init-from "
            f"{directory.path}",
        )
    aside = directory.checkpoints / "before_extension"
    aside.mkdir(exist_ok=True)
    for step, path in reversed(found):  # newest first: what remains can always be resumed or extended
        if step > trunk:
            shutil.rmtree(aside / path.name, ignore_errors=True)
            path.rename(aside / path.name)
