"""``triscale swarm``: run a question with a swarm of agents, resume it, report on it, compare it with one agent."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triscale.config import ConfigError, overlay, parse_overrides

from .main import LazyGroup
from .options import OVERRIDES, overrides_argument

if TYPE_CHECKING:
    from triscale.swarm.config import Prepared, SwarmConfig
    from triscale.swarm.orchestrator import SwarmResult

VERBS = {
    "run": ("triscale.cli.swarm:run", "Answer a question with a swarm."),
    "resume": ("triscale.cli.swarm:resume", "Continue an interrupted run; nothing is paid for twice."),
    "report": ("triscale.cli.swarm_report:report", "Timeline, tree, costs and findings of a run, as HTML and JSON."),
    "compare": ("triscale.cli.swarm_report:compare", "The same task with a swarm and with a single agent."),
}
EXIT = {"completed": 0, "cancelled": 130}


@click.group(cls=LazyGroup, verbs=VERBS)
def swarm() -> None:
    """Agent swarms: an orchestrator, sub-agents in parallel, and a ledger of what each was worth."""


def _shared(function: Any) -> Any:
    """Options that both ``run`` and ``resume`` take."""
    options = [
        click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on stdout."),
        click.option("--dry-run", is_flag=True, help="Show what would run and its worst case; call no model."),
        click.option("--quiet", is_flag=True, help="No live view, only the answer."),
        overrides_argument,
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command(context_settings=OVERRIDES)
@click.argument("question", required=False)
@click.option("--docs", type=click.Path(path_type=Path), help="Folder of documents that agents search and open.")
@click.option("--world", help="A generated look-up world, for example wide:entities=100.")
@click.option("--model", help="Model name of the orchestrator (and of the sub-agents unless given).")
@click.option("--base-url", help="OpenAI-compatible endpoint [OPENAI_BASE_URL, or http://127.0.0.1:8000/v1].")
@click.option("--subagent-model", help="Model name of the sub-agents.")
@click.option("--subagent-base-url", help="Endpoint of the sub-agents.")
@click.option("--context", type=int, help="Context window of the model in tokens [asked from the endpoint].")
@click.option("--single", is_flag=True, help="One agent, same task, tools and limits.")
@click.option("--virtual", is_flag=True, help="Virtual clock, for worlds with scripted models.")
@click.option("--ray", is_flag=True, help="Run sub-agents as Ray tasks.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with the fields of the config.")
@click.option("--trust-imports", is_flag=True, help="Allow the config file to import your own client classes.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run [runs/swarm-DATE-TIME].")
@_shared
def run(
    question: str | None, file: Path | None, trust_imports: bool, out: Path | None, as_json: bool, dry_run: bool,
    quiet: bool, overrides: tuple[str, ...], **flags: Any,
) -> None:  # fmt: skip
    """Answer QUESTION with a swarm of agents.

    Any field of the config can be set as --path.to.field=VALUE, for example --limits.concurrent=20 or
    --limits.cost=1.50. Ctrl-C stops every agent, keeps what is done, and prints the command that resumes.
    """
    from triscale.swarm.config import load_config

    if question is not None and question.startswith("--"):  # an override in front, and no question (a world's)
        overrides = (question, *overrides)
        question = None
    over = overlay(_flags(question, flags), parse_overrides(overrides))
    config = load_config(file, over, trust_imports=trust_imports)
    directory = out or Path("runs") / datetime.now().strftime("swarm-%Y%m%d-%H%M%S")
    _go(config, directory, as_json, dry_run, quiet)


@click.command(context_settings=OVERRIDES)
@click.argument("directory", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@_shared
def resume(directory: Path, as_json: bool, dry_run: bool, quiet: bool, overrides: tuple[str, ...]) -> None:
    """Continue the run in folder RUN where it stopped: finished assignments are kept, recorded calls are replayed.

    Limits may be raised, for example --limits.tokens=2000000.
    """
    from triscale.config import read_toml
    from triscale.swarm.config import load_config

    base = read_toml(directory / "config.toml")
    over = parse_overrides(overrides)
    fixed = sorted({"task", "docs", "world", "mode"} & set(over))
    if fixed:
        raise ConfigError(fixed[0], "cannot change when a run is resumed", "Start a new run")
    _go(load_config(None, over, base=base), directory, as_json, dry_run, quiet)


def _flags(question: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """The plain flags as a config tree."""
    tree: dict[str, Any] = {}
    if question:
        tree["task"] = question
    if flags["docs"] is not None:
        tree["docs"] = str(flags["docs"])
    for name in ("world", "virtual", "ray"):
        if flags[name]:
            tree[name] = flags[name]
    if flags["single"]:
        tree["mode"] = "single"
    model: dict[str, Any] = {"model": flags["model"], "base_url": flags["base_url"],
                             "context_window": flags["context"]}  # fmt: skip
    model = {name: value for name, value in model.items() if value is not None}
    if flags["model"]:
        default = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
        tree["model"] = {"kind": "http", "base_url": default} | model
    sub = {"model": flags["subagent_model"], "base_url": flags["subagent_base_url"]}
    given = {name: value for name, value in sub.items() if value is not None}
    if given:
        tree["subagent"] = tree.get("model", {"kind": "http"}) | given
    return tree


def _go(config: SwarmConfig, directory: Path, as_json: bool, dry_run: bool, quiet: bool) -> None:
    """Run, print, and leave with a status that says how it ended."""
    from triscale.swarm import clock
    from triscale.swarm.config import save_config

    if dry_run:
        plan = clock.run(_plan(config))
        click.echo(json.dumps(plan, indent=2, ensure_ascii=False) if as_json else _plan_text(plan))
        return
    save_config(config, directory)
    prepared, result = clock.run(_run(config, directory, quiet or as_json), virtual=config.virtual)
    scores = prepared.world.score(result.text) if prepared.world is not None else None
    if as_json:
        click.echo(json.dumps(_result_json(result, scores), indent=2, ensure_ascii=False))
    else:
        click.echo(result.text)
        click.echo(_closing(result, scores), err=True)
    sys.exit(EXIT.get(result.outcome, 1))


async def _run(config: SwarmConfig, directory: Path, quiet: bool) -> tuple[Prepared, SwarmResult]:
    from triscale.swarm.config import prepare
    from triscale.swarm.live import LiveView

    view = LiveView(quiet=quiet, virtual=config.virtual)
    prepared = await prepare(config, directory, (view.take,))
    if not quiet:
        view.line(f"run folder {directory}; {_limits_line(config)}")
    with view:
        _stop_on_interrupt(prepared, view, config)
        heart = asyncio.create_task(view.heartbeat())
        try:
            return prepared, await prepared.swarm.run(prepared.task)
        finally:
            heart.cancel()


def _stop_on_interrupt(prepared: Prepared, view: Any, config: SwarmConfig) -> None:
    """First Ctrl-C: stop everything and return what there is. Second: leave at once (the log is on disk)."""
    import signal

    pressed = []

    def stop() -> None:
        pressed.append(1)
        if len(pressed) > 1:
            os._exit(130)
        grace = config.limits.grace_seconds
        view.line(f"stopping {view.state.running} agents (at most {grace:g} s; Ctrl-C again leaves at once)")
        prepared.swarm.cancel("interrupted by the user (Ctrl-C)")

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            asyncio.get_running_loop().add_signal_handler(number, stop)
        except (NotImplementedError, RuntimeError, ValueError):  # not on this platform, or not the main thread
            return


def _limits_line(config: SwarmConfig) -> str:
    given = {name: value for name, value in config.limits.to_dict().items() if value is not None}
    return "limits: " + ", ".join(f"{name} {value}" for name, value in given.items())


def _closing(result: SwarmResult, scores: dict[str, float] | None) -> str:
    """What a person must know at the end; partial is never shown as complete."""
    usage = result.usage
    counts = ", ".join(f"{n} {name}" for name, n in sorted(result.outcomes.items())) or "none"
    lines = [
        f"{result.outcome}{': ' + result.reason if result.reason else ''}",
        f"assignments: {counts}",
        f"{result.seconds:.1f} s, {result.steps} steps, {result.critical_steps} critical steps, cost {usage.cost:.4f}, "
        f"tokens: {usage.tokens_in:,} in ({usage.tokens_cached:,} cached), {usage.tokens_out:,} out",
    ]
    if result.partial and result.outcome == "completed":
        lines.append("PARTIAL: not every assignment completed; the answer may miss what they were to find")
    if scores is not None:
        lines.append("score: " + ", ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    if result.abandoned:
        lines.append("left behind (ignored cancellation): " + ", ".join(result.abandoned))
    if result.resume_command:
        lines.append(f"continue with: {result.resume_command}")
    lines.append(f"report: triscale swarm report {result.directory}")
    return "\n".join(lines)


def _result_json(result: SwarmResult, scores: dict[str, float] | None) -> dict[str, Any]:
    usage = result.usage
    return {
        "outcome": result.outcome, "reason": result.reason, "limit": result.limit, "partial": result.partial,
        "text": result.text, "seconds": result.seconds, "steps": result.steps,
        "critical_steps": result.critical_steps, "outcomes": result.outcomes,
        "usage": {"tokens_in": usage.tokens_in, "tokens_out": usage.tokens_out, "tokens_cached": usage.tokens_cached,
                  "cost": usage.cost},
        "score": scores, "run": str(result.directory), "resume": result.resume_command,
    }  # fmt: skip


async def _plan(config: SwarmConfig) -> dict[str, Any]:
    """What a run would be, found out without calling a model."""
    from triscale.swarm.config import prepare
    from triscale.swarm.delegation import SPECS

    prepared = await prepare(config, None)
    made, limits = prepared.swarm, config.limits
    clients = {}
    for role, client in (("orchestrator", made.client), ("subagent", made.subagent_client or made.client)):
        clients[role] = {"model": client.name, "endpoint": client.endpoint, "context_window": client.context_window}
    children = limits.total if config.mode == "swarm" and limits.depth else 0
    calls = limits.orchestrator_steps + children * limits.subagent_steps
    plan = {
        "task": prepared.task, "mode": config.mode, "models": clients, "tools": [tool.name for tool in made.tools],
        "delegation": [spec.name for spec in SPECS] if children else [],
        "limits": {name: value for name, value in limits.to_dict().items() if value is not None},
        "told_to_the_model": limits.state_to_model(delegates=bool(children)),
        "worst_case": {"model_calls": calls, "assignments": children, "tokens": limits.tokens, "cost": limits.cost,
                       "wall_seconds": limits.wall_seconds},
    }  # fmt: skip
    for thing in (made.client, made.subagent_client, *made.tools):
        if thing is not None:
            await thing.close()
    return plan


def _plan_text(plan: dict[str, Any]) -> str:
    worst = plan["worst_case"]
    bounds = [f"{worst['model_calls']:,} model calls", f"{worst['assignments']:,} assignments"]
    bounds += [f"{name} {worst[name]}" for name in ("tokens", "cost", "wall_seconds") if worst[name] is not None]
    lines = [f"task: {plan['task']}", f"mode: {plan['mode']}"]
    lines += [f"{role}: {m['model']} at {m['endpoint']} (window {m['context_window'] or 'unknown'})"
              for role, m in plan["models"].items()]  # fmt: skip
    lines += [f"tools: {', '.join(plan['tools'] + plan['delegation']) or 'none'}",
              "limits: " + ", ".join(f"{name} {value}" for name, value in plan["limits"].items()),
              f"told to the model: {plan['told_to_the_model']}",
              f"worst case: {', '.join(bounds)}" + ("" if worst["tokens"] or worst["cost"] else
              "; set --limits.tokens or --limits.cost to bound the spending")]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    swarm(prog_name="triscale swarm")
