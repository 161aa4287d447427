"""``triscale eval``: held-out loss, your own text, needle retrieval."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .options import TRUST_RUN


@click.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True))
@click.option("--text", type=click.Path(path_type=Path, exists=True), help="Also measure the loss on this text file.")
@click.option("--needle", multiple=True, type=click.IntRange(32), help="Needle retrieval at this length (repeatable).")
@click.option("--device", default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@TRUST_RUN
def evaluate(
    run: Path, text: Path | None, needle: tuple[int, ...], device: str, as_json: bool, trust_imports: bool
) -> None:
    """Evaluate RUN on its held-out documents, and on request on your own text and on retrieval."""
    from triscale.train.evaluation import evaluate_run

    result = evaluate_run(run, text=text, needle=needle, device=device, trust_imports=trust_imports)
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"step {result['step']}")
    for name in ("heldout", "text"):
        if name in result:
            row = result[name]
            size = f"({row['tokens']:,} tokens)"
            click.echo(f"{name:<8} {row['loss']:.4f} nats/token  {row['bits_per_byte']:.4f} bits/byte  {size}")
    for length, row in result.get("needle", {}).items():
        click.echo(f"needle at {length}: {row['accuracy']:.0%} of {row['n']} retrieved")
