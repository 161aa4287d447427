"""``triscale models``: the sizes this project knows by name, and what each weighs."""

from __future__ import annotations

import json

import click


@click.group(invoke_without_command=True)
@click.pass_context
def models(ctx: click.Context) -> None:
    """List model sizes and published architectures."""
    if ctx.invoked_subcommand is not None:
        return
    from triscale.models.describe import describe
    from triscale.models.presets import presets
    from triscale.train.progress import short_number

    click.echo(f"{'name':<22}{'layers':>7}{'width':>7}{'total':>9}{'active':>9}  description")
    for preset in presets().values():
        figures = describe(preset)
        total, active = (short_number(figures["parameters"][k]).replace("G", "B") for k in ("total", "active"))
        width = preset.config.width
        click.echo(f"{preset.name:<22}{figures['layers']:>7}{width:>7}{total:>9}{active:>9}  {preset.title}")
    click.echo("Any other size works too: triscale models show 12M")


@models.command()
@click.argument("name")
@click.option("--context", default=4096, show_default=True, type=click.IntRange(1), help="Length at which FLOPs count.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--toml", "as_toml", is_flag=True, help="Print the [model] table for a config file.")
def show(name: str, context: int, as_json: bool, as_toml: bool) -> None:
    """Layers, parameters by component, cache and FLOPs of NAME (a model, or a size such as 12M)."""
    from triscale.config import dump_toml, to_dict
    from triscale.models.describe import describe, render
    from triscale.models.presets import find_preset

    preset = find_preset(name)
    if as_toml:
        click.echo(dump_toml({"model": to_dict(preset.config)}), nl=False)
        return
    figures = describe(preset, context)
    click.echo(json.dumps(figures, indent=1) if as_json else "\n".join(render(figures)))
