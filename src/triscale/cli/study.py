"""``triscale study``: prepared questions."""

from __future__ import annotations

import difflib
import inspect
from importlib import import_module
from pathlib import Path

import click

# name: (module, question); each module has run(output: Path, **settings), and may have plan(**settings) -> str, its cost
STUDIES: dict[str, tuple[str, str]] = {
    "memory-tasks": (
        "triscale.studies.memory_tasks",
        "Which mixers remember palindromes, pairs, stacks?",
    ),
    "loss-by-position": ("triscale.studies.loss_by_position", "How does loss fall with the token's position?"),
    "qk-clip": ("triscale.studies.qk_clip", "Does QK-Clip hold growing logits, and does it cost retrieval?"),
    "muon-attribution": ("triscale.studies.muon_attribution", "Which ingredient of MuonClip carries the gain?"),
    "swarm-width": ("triscale.studies.swarm_width", "When does a swarm save time over one agent, and at what cost?"),
    "attnres": ("triscale.studies.attnres", "Do Attention Residuals help over recurrent layers too?"),
    "expert-balance": ("triscale.studies.expert_balance", "How fast does a routing bias even out its experts?"),
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@click.option("--output", type=click.Path(path_type=Path), help="Result folder [default: runs/study-NAME].")
@click.option("--dry-run", is_flag=True, help="Print the settings and, where known, the cost; run nothing.")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[--setting=VALUE]...")
def study(name: str | None, output: Path | None, dry_run: bool, settings: tuple[str, ...]) -> None:
    """Run the study NAME (or list them all); running it again resumes."""
    from triscale.config import ConfigError, parse_overrides
    from triscale.train.interrupt import Interrupted

    if name is None:
        for key, (_, question) in STUDIES.items():
            click.echo(f"{key:<18} {question}")
        return
    if name not in STUDIES:
        raise ConfigError("study", f"no study is called {name!r}", f"Known: {', '.join(STUDIES)}")
    module = import_module(STUDIES[name][0])
    run = module.run
    known = {key: p.default for key, p in inspect.signature(run).parameters.items() if key != "output"}
    chosen = parse_overrides(settings)
    for key in chosen:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            fix = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}"
            raise ConfigError(f"study.{name}.{key}", "unknown setting", fix)
    folder = output or Path("runs") / f"study-{name}"
    if dry_run:
        click.echo(f"{STUDIES[name][1]}\nresult folder {folder}")
        for key, value in {**known, **chosen}.items():
            click.echo(f"  {key:<20} {value!r}")
        if hasattr(module, "plan"):
            click.echo(module.plan(**chosen))
        return
    try:
        run(folder, **chosen)
    except Interrupted:
        click.echo(f"stopped; the same command resumes {folder}", err=True)
        raise SystemExit(130) from None
