"""``triscale swarm report`` and ``triscale swarm compare``."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from triscale.swarm.contribution import Contributions
    from triscale.swarm.ledger import Ledger
    from triscale.swarm.twin import Comparison
    from triscale.swarm.types import ModelClient
    from triscale.swarm.worlds import LookupWorld

FREE_REPLAYS = 300  # assignments up to which a scripted final step is replayed unasked


@click.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for report.html and report.json (default RUN/report)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a summary.")
@click.option("--replay", metavar="MODEL", help="Measure each sub-agent's contribution by leave-one-out replays of the "
              "final step with this model (scripted = the world's script, made unasked up to 300 assignments). "
              "Needs a run of a world, whose answer can be scored.")  # fmt: skip
@click.option("--base-url", help="OpenAI-compatible endpoint of the --replay model (key from OPENAI_API_KEY).")
@click.option(
    "--otel", is_flag=True, help="Also send the run as one OpenTelemetry trace (OTEL_EXPORTER_OTLP_ENDPOINT)."
)
@click.option("--otel-content", is_flag=True, help="With --otel: include prompts, answers and tool texts.")
def report(
    run: Path, out: Path | None, as_json: bool, replay: str | None, base_url: str | None, otel: bool, otel_content: bool
) -> None:
    """Report on RUN: who was spawned, what it cost, how long it had to take, and which sub-agent was worth it.

    Writes one self-contained HTML page, the same as JSON, and the ledger as SQLite (RUN/ledger.sqlite).
    """
    from triscale.swarm.ledger import Ledger
    from triscale.swarm.report import Report

    folder = run if run.is_dir() else run.parent
    ledger = Ledger.of_run(run, file=folder / "ledger.sqlite")
    world = _world_of(ledger)
    text = ledger.run["text"]
    score = world.score(text) if world is not None and text else None
    page = Report(ledger, score=score, contributions=_contributions(ledger, world, replay, base_url))
    paths = page.write(out or folder / "report")
    trace = None
    if otel or otel_content:
        from triscale.swarm.telemetry import export_trace

        trace = export_trace(ledger, content=otel_content)
    if as_json:
        click.echo(json.dumps(page.to_dict(), ensure_ascii=False))
        return
    for name, value in page.summary():
        click.echo(f"{name:<18}{value}")
    for finding in page.findings:
        click.echo(f"\n{finding.level}: {finding.text} [{finding.kind}]", nl=False)
    click.echo(f"\n\n{paths['html']}\n{paths['json']}\n{folder / 'ledger.sqlite'}")
    if trace is not None:
        click.echo(f"trace {trace}")


def _world_of(ledger: Ledger) -> LookupWorld | None:
    """The world a run was made in, if it names one that can be made again."""
    from triscale.config import ConfigError
    from triscale.swarm.worlds import make_world

    spec = ledger.run["world"]
    if not spec:
        return None
    try:
        world = make_world(spec)
    except ConfigError:
        return None
    return world if world.question == ledger.run["task"] else None


def _contributions(
    ledger: Ledger, world: LookupWorld | None, model: str | None, base_url: str | None
) -> Contributions | None:
    """Leave-one-out where the answer can be scored: replays are free for a scripted model, and asked for otherwise."""
    from triscale.config import ConfigError
    from triscale.swarm import clock
    from triscale.swarm.contribution import leave_one_out

    if world is None or not ledger.tasks():
        if model:
            raise ConfigError("replay", "this run's answer cannot be scored, so replays measure nothing",
                              "Leave --replay out: the report then estimates contributions by overlap")  # fmt: skip
        return None
    client: ModelClient
    scripted = str(ledger.run["orchestrator"]).startswith("scripted")
    if scripted and not model and len(ledger.tasks()) > FREE_REPLAYS:
        click.echo(f"{len(ledger.tasks())} assignments: contributions are estimated by overlap; --replay scripted "
                   "measures them", err=True)  # fmt: skip
        return None
    if model and model != "scripted":
        from triscale.swarm.client_http import HttpClient

        if not base_url:
            raise ConfigError("base_url", "missing", "Give the endpoint of the --replay model")
        client, virtual = HttpClient.Config(model=model, base_url=base_url).build(), False
    elif scripted or model == "scripted":
        client, virtual = world.scripted("orchestrator"), True
    else:
        return None

    begin = told = time.monotonic()

    def progress(made: int, assignments: int) -> None:
        nonlocal told
        if time.monotonic() - told > 2.0:
            told = time.monotonic()
            click.echo(f"replaying the final step without one result at a time: {made} replays for {assignments} "
                       f"assignments, {told - begin:.0f} s", err=True)  # fmt: skip

    async def replay() -> Contributions:
        try:
            return await leave_one_out(ledger, client, world.score, progress=progress)
        finally:
            await client.close()

    return clock.run(replay(), virtual=virtual)


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--world", help="Run both in a look-up world with scripted agents, for example wide:entities=50.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the run or runs that are made.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(runs: tuple[Path, ...], world: str | None, out: Path | None, as_json: bool) -> None:
    """Put a swarm beside its single-agent twin: same task, tools and limits.

    Give one finished RUN to make its twin now (in RUN-single, with RUN's config), two RUNS of one task to compare what
    is there, or --world to make both in a look-up world.
    """
    from triscale.config import ConfigError
    from triscale.swarm.ledger import Ledger
    from triscale.swarm.twin import compare_runs

    for run in runs:
        if not run.is_dir():
            raise ConfigError("run", f"{str(run)!r} is not the folder of a run")
    if world is not None and not runs:
        comparison = _compare_world(world, out)
    elif len(runs) in (1, 2) and world is None:
        second = runs[1] if len(runs) == 2 else _make_twin(runs[0], out, quiet=as_json)
        made_in = _world_of(Ledger.of_run(runs[0]))
        comparison = compare_runs(runs[0], second, made_in.score if made_in else None)
    else:
        raise ConfigError("runs", f"{len(runs)} given", "Give one or two run folders, or --world SPEC and no folder")
    result = comparison.to_dict()
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    click.echo(f"{'':<20}{'swarm':>14}{'single agent':>14}{'swarm/single':>14}")
    for name, values in result["numbers"].items():
        click.echo(
            f"{name:<20}{_number(values['swarm']):>14}{_number(values['single']):>14}{_number(values['ratio']):>14}"
        )
    click.echo("")
    for sentence in [*result["verdict"], result["remark"]]:
        click.echo(sentence)


def _make_twin(run: Path, out: Path | None, *, quiet: bool) -> Path:
    """Run the single agent of a swarm run's own config; one that was interrupted goes on, a finished one stands."""
    from triscale.config import ConfigError, read_toml
    from triscale.swarm import clock
    from triscale.swarm.config import load_config, prepare, save_config
    from triscale.swarm.live import LiveView
    from triscale.swarm.twin import twin_limits

    if not (run / "config.toml").exists():
        raise ConfigError("run", f"{str(run)!r} holds no config.toml", "Runs made by `triscale swarm run` have one")
    config = load_config(None, {"mode": "single"}, base=read_toml(run / "config.toml"))
    config = replace(config, limits=twin_limits(config.limits))
    folder = out or run.with_name(run.name + "-single")
    save_config(config, folder)

    async def twin() -> None:
        view = LiveView(quiet=quiet)
        prepared = await prepare(config, folder, (view.take,))
        with view:
            await prepared.swarm.run(prepared.task)

    clock.run(twin(), virtual=config.virtual)
    return folder


def _compare_world(spec: str, out: Path | None) -> Comparison:
    import tempfile

    from triscale.swarm import clock
    from triscale.swarm.limits import Limits
    from triscale.swarm.orchestrator import Swarm
    from triscale.swarm.twin import run_twins
    from triscale.swarm.worlds import make_world, world_spec

    world = make_world(spec)
    swarm = Swarm(
        client=world.scripted("orchestrator"), subagent_client=world.scripted("subagent"), tools=world.tools,
        limits=Limits(), world=world_spec(world),
    )  # fmt: skip

    def both(folder: Path) -> Comparison:
        work = run_twins(
            swarm, world.question, single_client=world.scripted("single"), directory=folder, score=world.score
        )
        return clock.run(work, virtual=True)

    if out is not None:
        return both(out)
    with tempfile.TemporaryDirectory(prefix="triscale-compare-") as folder:
        return both(Path(folder))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4g}"
