"""``triscale convert``: checkpoints from and to the publishers' formats."""

from __future__ import annotations

import time
from pathlib import Path

import click

from .options import TRUST_RUN

OURS = "triscale"
FORMATS = (OURS, "llama", "deepseek_v3", "kimi_linear", "kimi_k25", "kimi_k3")


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--from", "source_format", type=click.Choice(FORMATS), help="Format of SOURCE; told from its files.")
@click.option("--to", "target_format", type=click.Choice(FORMATS), help="Format of TARGET; default: the other side.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), help="Default: each tensor keeps its own.")
@click.option("--pack", type=click.Choice(["mxfp4", "int4"]), help="Pack the routed experts when exporting.")
@click.option("--shard-gb", default=5.0, show_default=True, type=click.FloatRange(0, min_open=True),
              help="Largest shard written, in GB.")  # fmt: skip
@TRUST_RUN
def convert(
    source: Path, target: Path, source_format: str | None, target_format: str | None, dtype: str | None,
    pack: str | None, shard_gb: float, trust_imports: bool,
) -> None:  # fmt: skip
    """Convert SOURCE (a published folder, or a run folder or checkpoint of ours) into the folder TARGET.

    Shards are streamed: memory stays near one tensor. Every tensor is used exactly once, or named.
    """
    from triscale.models.published.stream import parse_dtype
    from triscale.train.conversion import export_model, import_model
    from triscale.train.progress import Progress

    kind = parse_dtype(dtype) if dtype else None
    importing = _is_import(source, source_format, target_format)
    started = time.monotonic()
    with Progress("convert:") as progress:
        report = _reporter(progress, source.name)
        if importing:
            if pack:
                raise click.UsageError("--pack is for exporting")
            done = import_model(source, target, source_format, kind, report)
        else:
            bytes_limit = int(shard_gb * 10**9)
            done = export_model(source, target, target_format, kind, pack, bytes_limit, report, trust_imports)  # type: ignore[arg-type]
    for line in done.lines:
        click.echo(line)
    click.echo(f"{source} -> {target} in {time.monotonic() - started:.1f} s")


def _is_import(source: Path, source_format: str | None, target_format: str | None) -> bool:
    ours = not (source / "config.json").exists() if source_format is None else source_format == OURS
    to_ours = not ours if target_format is None else target_format == OURS
    if ours == to_ours:
        raise click.UsageError(f"one side must be {OURS}: convert twice to go from one published format to another")
    return not ours


def _reporter(progress, name: str):
    def report(done: int, total: int) -> None:
        progress.status(f"{name}: {done / 1e9:.2f} of {total / 1e9:.2f} GB ({100 * done // max(total, 1)} %)")

    return report
