"""``triscale ladder``: plan, tune, run, report and check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .main import LazyGroup
from .options import OVERRIDES, overrides_argument

VERBS = {
    "list": ("triscale.cli.ladder:list_ladders", "List the ladders that come with TriScale."),
    "plan": ("triscale.cli.ladder:plan", "Estimate minutes, and the seeds a wanted effect needs."),
    "tune": ("triscale.cli.ladder:tune", "Find each arm's learning rate on the smallest rung."),
    "run": ("triscale.cli.ladder:run", "Run what is missing, then report."),
    "report": ("triscale.cli.ladder:report", "Print the verdict table and write the HTML report."),
    "check": ("triscale.cli.ladder:check", "Test the whole chain: false verdicts, a planted effect, a real pair."),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def ladder() -> None:
    """Measure what parts are worth: LADDER is a TOML file or the name of a shipped ladder."""


RUNS = click.option("--runs", type=click.Path(path_type=Path), help="Run folder [default: runs/LADDER].")
TRUST = click.option("--trust-imports", is_flag=True, help="Allow the ladder file to import your own parts.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


def _load(name: str, overrides: tuple[str, ...], trust: bool, runs: Path | None = None):
    from triscale.config import from_dict, parse_overrides
    from triscale.ladder.config import load_ladder
    from triscale.ladder.run import LadderRunner
    from triscale.train.config import Runtime

    tree = parse_overrides(overrides)
    runtime = from_dict(Runtime, tree.pop("runtime", {}), "runtime")
    loaded = load_ladder(name, tree, trust)
    return LadderRunner(loaded, runs or Path("runs") / loaded.name, runtime)


@click.command("list")
def list_ladders() -> None:
    """List the ladders that come with TriScale."""
    from triscale.ladder.config import load_ladder, shipped_ladders

    for name in shipped_ladders():
        found = load_ladder(name)
        arms = ", ".join(arm.name for arm in found.arms)
        click.echo(f"{name:<12} {len(found.rungs)} rungs, {len(found.seeds)} seeds, arms: {arms}")


@click.command(context_settings=OVERRIDES)
@click.argument("name", metavar="LADDER")
@TRUST
@JSON
@click.option("--effect", type=click.FloatRange(0, min_open=True), help="Loss difference you want to be able to see.")
@click.option("--pair-sd", type=click.FloatRange(0, min_open=True), default=0.01, show_default=True,
              help="Standard deviation of the paired loss difference between seeds.")  # fmt: skip
@click.option("--record", type=click.Path(path_type=Path, exists=True),
              help="Take the standard deviation from this finished ladder instead (its 95 % upper limit).")  # fmt: skip
@overrides_argument
def plan(
    name: str, trust_imports: bool, as_json: bool, effect: float | None, pair_sd: float, record: Path | None, overrides
) -> None:
    """Time one micro-batch of every arm and print the table of costs; nothing is trained."""
    from triscale.ladder.plan import plan_ladder

    runner = _load(name, overrides, trust_imports)
    planned = _planned(runner, plan_ladder)
    result: dict[str, Any] = planned.to_dict()
    lines = planned.lines()
    if effect is not None:
        from triscale.ladder.plan_power import seeds_needed

        if record is not None:
            pair_sd = _observed_sd(record)
        config = runner.ladder
        needed = seeds_needed(effect, pair_sd, rungs=len(config.rungs), arms=len(config.arms) - 1)
        result |= {"effect": effect, "pair_sd": pair_sd, "seeds_needed": needed.seeds, "power": needed.reached}
        lines.append(
            f"a loss difference of {effect:g} nats per token with a pair SD of {pair_sd:.4g} needs "
            f"{needed.seeds or 'more than 1,000'} seeds on {len(config.rungs)} rung(s) (power {needed.reached:.2f})"
        )
    click.echo(json.dumps(result) if as_json else "\n".join(lines))


def _observed_sd(path: Path) -> float:
    from triscale.config import ConfigError
    from triscale.ladder.plan_power import observed_pair_sd
    from triscale.ladder.records import load_record

    observed = observed_pair_sd(load_record(path))
    if observed is None:
        raise ConfigError("--record", f"{path} has no arm with two finished pairs at one rung")
    return observed.upper


@click.command(context_settings=OVERRIDES)
@click.argument("name", metavar="LADDER")
@RUNS
@TRUST
@JSON
@click.option("--arm", "arms", multiple=True, help="Tune only this arm (repeatable).")
@click.option("--rung", "rungs", multiple=True, help="Tune on this rung instead of the smallest (repeatable).")
@click.option("--dry-run", is_flag=True, help="Print what one rate costs instead.")
@overrides_argument
def tune(
    name: str, runs: Path | None, trust_imports: bool, as_json: bool, arms: tuple[str, ...], rungs: tuple[str, ...],
    dry_run: bool, overrides,
) -> None:  # fmt: skip
    """Sweep the learning rate of each arm; prints the best and records every run."""
    from triscale.ladder.tune import plan_tuning
    from triscale.ladder.tune import tune as sweep
    from triscale.train.progress import Progress

    runner = _load(name, overrides, trust_imports)
    if dry_run:
        planned = _planned(runner, lambda runner: plan_tuning(runner, arms, rungs))
        click.echo(json.dumps(planned.to_dict()) if as_json else "\n".join(planned.lines()))
        return
    folder = runs or Path("runs") / f"{runner.ladder.name}-tuning"
    with Progress() as progress:
        record = _interruptible(lambda: sweep(runner.ladder, folder, runner.runtime, progress, arms, rungs), folder)
    if as_json:
        click.echo(json.dumps(record))
        return
    for rung, found in record["rungs"].items():
        for arm, row in found["arms"].items():
            inside = "" if row["inside"] else "  (at the edge of the grid: try more rates)"
            losses = row["losses"].items()
            tried = ", ".join(f"{rate}: {loss:.4f}" if loss else f"{rate}: diverged" for rate, loss in losses)
            click.echo(f"{rung:<10} {arm:<24} {row['best']:g}{inside}   [{tried}]")


@click.command(context_settings=OVERRIDES)
@click.argument("name", metavar="LADDER")
@RUNS
@TRUST
@JSON
@click.option("--shard", default="0/1", show_default=True, help="i/n: this process runs every n-th cell from i.")
@click.option("--dry-run", is_flag=True, help="Print the plan instead.")
@overrides_argument
def run(name: str, runs: Path | None, trust_imports: bool, as_json: bool, shard: str, dry_run: bool, overrides) -> None:
    """Run what is missing of LADDER and print the verdict table; the same command resumes."""
    from triscale.config import ConfigError
    from triscale.train.progress import Progress

    runner = _load(name, overrides, trust_imports, runs)
    if dry_run:
        _print_plan(runner, as_json)
        return
    index, _, count = shard.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError("--shard", f"{shard!r} is not i/n with 0 <= i < n", "Write for example --shard 0/2")
    with Progress() as progress:
        record = _interruptible(lambda: runner.run(progress, (int(index), int(count))), runner.folder)
    _report(record, runner.folder, as_json)


def _planned(runner, plan):
    """The plan of a ladder; preparing its data shows progress."""
    from triscale.train.progress import Progress

    with Progress(f"{runner.ladder.name}:") as progress:
        runner.preparing = progress.preparing
        return plan(runner)


def _print_plan(runner, as_json: bool) -> None:
    from triscale.ladder.plan import plan_ladder

    planned = _planned(runner, plan_ladder)
    click.echo(json.dumps(planned.to_dict()) if as_json else "\n".join(planned.lines()))


@click.command()
@click.argument("runs", type=click.Path(path_type=Path, exists=True))
@JSON
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder of the HTML report [default: RUNS/report].")
def report(runs: Path, as_json: bool, markdown: bool, output: Path | None) -> None:
    """Report on RUNS: a ladder's run folder or a committed summary."""
    from triscale.ladder.records import load_record

    if markdown:
        from triscale.ladder.markdown import markdown_table
        from triscale.ladder.verdict import analyse

        click.echo(markdown_table(analyse(load_record(runs))))
        return
    _report(load_record(runs), runs if runs.is_dir() else runs.parent, as_json, output)


def _report(record, folder: Path, as_json: bool, output: Path | None = None) -> None:
    from triscale.ladder.report import report_json, write_report
    from triscale.ladder.tables import print_report
    from triscale.ladder.verdict import analyse

    if as_json:
        click.echo(json.dumps(report_json(record)))
        return
    result = analyse(record)
    page = write_report(result, output or folder / "report")
    print_report(result)
    click.echo(f"report: {page}")


@click.command(context_settings=OVERRIDES)
@RUNS
@JSON
@click.option("--record", type=click.Path(path_type=Path, exists=True),
              help="Recorded ladder (docs/results/demo, for example) to simulate from; none = real runs only.")  # fmt: skip
@click.option("--simulate-only", is_flag=True, help="Skip the small real runs.")
@click.option("--dry-run", is_flag=True, help="Print what the small real runs cost instead.")
@overrides_argument
def check(runs: Path | None, as_json: bool, record: Path | None, simulate_only: bool, dry_run: bool, overrides) -> None:
    """Check the ladder itself: A-versus-A, a planted effect, and two small real comparisons."""
    from triscale.config import ConfigError
    from triscale.ladder.check import check_statistics
    from triscale.ladder.records import load_record
    from triscale.ladder.report import report_json

    if dry_run:
        _print_plan(_load("check", overrides, False, runs), as_json)
        return
    if simulate_only and record is None:
        raise ConfigError("--simulate-only", "needs a recorded ladder", "Add --record docs/results/demo, for example")
    result: dict[str, Any] = {}
    if record is not None:
        result["simulation"] = check_statistics(load_record(record)).to_dict()
    if not simulate_only:
        from triscale.train.progress import Progress

        runner = _load("check", overrides, False, runs)
        with Progress() as progress:
            measured = _interruptible(lambda: runner.run(progress), runner.folder)
        arms = report_json(measured)["arms"]
        wanted = {"identical": "no difference detected", "slow": "worse"}
        result["real"] = {name: {"verdict": arms[name]["verdict"], "expected": wanted[name]} for name in wanted}
    click.echo(json.dumps(result, indent=None if as_json else 1))
    wrong = [name for name, row in result.get("real", {}).items() if row["verdict"] != row["expected"]]
    if wrong:
        raise click.ClickException(f"unexpected verdicts: {', '.join(wrong)}")


def _interruptible(work, folder: Path):
    from triscale.train.interrupt import Interrupted

    try:
        return work()
    except Interrupted:
        click.echo(f"stopped; the same command resumes {folder}", err=True)
        raise SystemExit(130) from None
