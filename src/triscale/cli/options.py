"""Pieces shared by verbs that take a config file and dotted overrides."""

from __future__ import annotations

from pathlib import Path

import click

from triscale.config import ConfigError

TRUST_RUN = click.option("--trust-imports", is_flag=True, help="Allow the run's config to import your own parts.")
OVERRIDES = {"ignore_unknown_options": True, "allow_extra_args": False}


def overrides_argument(function):
    """Everything of the form --path.to.field=VALUE."""
    return click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--path.to.field=VALUE]...")(function)


def split_file(arguments: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """The optional leading config file, and the overrides."""
    files = [a for a in arguments if not a.startswith("--")]
    if len(files) > 1:
        raise ConfigError(files[1], "more than one config file given", "Write overrides as --path.to.field=VALUE")
    return (Path(files[0]) if files else None), [a for a in arguments if a.startswith("--")]
