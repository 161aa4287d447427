"""``triscale train``: one run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .options import OVERRIDES, overrides_argument, split_file


@click.command(context_settings=OVERRIDES)
@click.option("--run", "--run-dir", "run_dir", type=click.Path(path_type=Path), default=Path("runs/train"),
              show_default=True,
              help="Run folder; starting it again resumes. (torchrun takes --run for an option of its own.)")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print parameters, tokens, FLOPs, memory and minutes; train nothing.")
@click.option(
    "--extend",
    is_flag=True,
    help="Continue a run of the same config with more tokens; a WSD run from before its decay.",
)
@click.option(
    "--init-from", type=click.Path(path_type=Path, exists=True), help="Start from this run's or checkpoint's weights."
)
@click.option("--trust-imports", is_flag=True, help="Allow the config file to import your own parts.")
@click.option("--track", multiple=True, help="Also send metrics to tensorboard, wandb or trackio.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@overrides_argument
def train(
    run_dir: Path, dry_run: bool, extend: bool, init_from: Path | None, trust_imports: bool, track: tuple[str, ...],
    as_json: bool, overrides: tuple[str, ...],
) -> None:  # fmt: skip
    """Train a model from an optional TOML file and overrides such as --model.width=128 --train.tokens=2_000_000."""
    from triscale.train.config import load_settings

    file, rest = split_file(overrides)
    settings = load_settings(file, rest, trust_imports=trust_imports)
    if dry_run:
        from triscale.train.plan import plan

        planned = plan(settings.config, settings.runtime)
        click.echo(json.dumps(planned.to_dict()) if as_json else "\n".join(planned.lines()))
        return
    from triscale.train.distributed import World
    from triscale.train.start import start_run

    result = start_run(settings, run_dir, extend=extend, init_from=init_from, track=track)
    if not World().first:
        return
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo(f"held-out loss {result['loss']:.4f} nats/token, {result['bits_per_byte']:.4f} bits/byte")
        click.echo(f"run folder {run_dir}")
