"""``triscale compare``: two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("first", type=click.Path(path_type=Path, exists=True))
@click.argument("second", type=click.Path(path_type=Path, exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(first: Path, second: Path, as_json: bool) -> None:
    """Compare FIRST and SECOND: what differs in the config, what they cost and what they reached.

    One pair of runs says nothing about which is better in general; a ladder does.
    """
    from triscale.train.evaluation import compare_runs

    result = compare_runs(first, second)
    if as_json:
        click.echo(json.dumps(result))
        return
    for line in result["config"] or ["same config"]:
        click.echo(line)
    click.echo(f"\n{'':<16}{'first':>16}{'second':>16}{'second/first':>14}")
    for name, (a, b) in result["numbers"].items():
        ratio = f"{b / a:>14.3f}" if a and b else ""
        click.echo(f"{name:<16}{_number(a):>16}{_number(b):>16}{ratio}")
    click.echo(f"\n{result['remark']}")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
