"""``triscale generate``: text from a trained run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .options import TRUST_RUN


@click.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True))
@click.option("--prompt", default="", help="Text to continue; '-' reads it from standard input.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1), help="How many tokens to generate.")
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0), help="0 = most likely token.")
@click.option("--top-p", default=0.95, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="auto", show_default=True)
@TRUST_RUN
def generate(
    run: Path, prompt: str, tokens: int, temperature: float, top_p: float, seed: int, device: str, trust_imports: bool
) -> None:  # fmt: skip
    """Stream text from RUN: a run folder, or a ladder's folder (then its best model speaks)."""
    from triscale.ladder.run import best_cell
    from triscale.train.generate import generate_text
    from triscale.train.load import load_run

    best = best_cell(run)
    if best is not None:
        click.echo(f"best model: {best.relative_to(run)}", err=True)
        run = best
    if prompt == "-":
        prompt = sys.stdin.read()
    loaded = load_run(run, device, trust_imports)
    click.echo(prompt, nl=False)
    for piece in generate_text(loaded, prompt, tokens, temperature=temperature, top_p=top_p, seed=seed):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
