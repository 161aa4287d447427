"""``triscale config``: the resolved tree."""

from __future__ import annotations

from pathlib import Path

import click

from .options import OVERRIDES, overrides_argument, split_file


@click.group()
def config() -> None:
    """Inspect configuration."""


@config.command(context_settings=OVERRIDES)
@click.option("--trust-imports", is_flag=True, help="Allow the config file or run to import your own parts.")
@click.option("--run", type=click.Path(path_type=Path, exists=True), help="Show the config of an existing run.")
@overrides_argument
def show(trust_imports: bool, run: Path | None, overrides: tuple[str, ...]) -> None:
    """Print the fully resolved tree as TOML; it can be saved and used as a config file."""
    from triscale.config import dump_toml
    from triscale.train.config import load_settings, resolved
    from triscale.train.run_directory import RunDirectory

    file, rest = split_file(overrides)
    base = RunDirectory(run).trusted_tree(trust_imports) if run else None
    settings = load_settings(file, rest, base=base, trust_imports=trust_imports)
    click.echo(dump_toml(resolved(settings.config)), nl=False)
