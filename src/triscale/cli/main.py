"""The ``triscale`` command: a table of verbs, each loaded only when it runs."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module

import click

from triscale.config import ConfigError, TriScaleError

# verb: (module:command, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "train": ("triscale.cli.train:train", "Train a model: one config file and --path.to.field=VALUE overrides."),
    "ladder": ("triscale.cli.ladder:ladder", "Measure what parts are worth: plan, tune, run, report, check."),
    "study": ("triscale.cli.study:study", "Answer one prepared question with its own figure."),
    "generate": ("triscale.cli.generate:generate", "Stream text from a trained run."),
    "eval": ("triscale.cli.evaluate:evaluate", "Held-out loss, loss on your own text, needle retrieval by length."),
    "compare": ("triscale.cli.compare:compare", "Put two runs side by side: config, cost and loss."),
    "models": ("triscale.cli.models:models", "List and inspect model sizes and published architectures."),
    "convert": ("triscale.cli.convert:convert", "Convert checkpoints from and to the publishers' formats."),
    "swarm": ("triscale.cli.swarm:swarm", "Run, resume, report and compare agent swarms."),
    "config": ("triscale.cli.config:config", "Show the fully resolved configuration."),
    "doctor": ("triscale.cli.doctor:doctor", "Print environment, devices and which backends decline, and why."),
}


class LazyGroup(click.Group):
    """A group whose commands are import paths; listing them imports nothing."""

    def __init__(self, *args, verbs: dict[str, tuple[str, str]], **kwargs):
        super().__init__(*args, **kwargs)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.verbs:
            return None
        module, _, attribute = self.verbs[name][0].partition(":")
        return getattr(import_module(module), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]):
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in self.verbs:
            from difflib import get_close_matches

            near = get_close_matches(name, self.verbs, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Verbs: {', '.join(self.verbs)}."
            raise click.UsageError(f"no verb is called {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in self.verbs.items()])


@click.group(cls=LazyGroup, verbs=VERBS, invoke_without_command=True, context_settings={"max_content_width": 110})
@click.version_option(package_name="triscale")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """TriScale: Muon, Kimi Linear, Attention Residuals and agent swarms, and a ladder that measures them."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Entry point: user errors are one plain message and exit code 2, without a traceback.

    Under torchrun a wrong setting fails every rank alike and only the first one says so.
    """
    rank = int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows "?" instead of ending the command
            stream.reconfigure(errors="replace")
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        if not rank:
            error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        if not rank:
            click.echo("interrupted", err=True)
        sys.exit(130)
    except TriScaleError as error:
        if not rank:
            click.echo(f"error: {error}", err=True)
        elif not isinstance(error, ConfigError) and not getattr(error, "told", False):
            click.echo(f"error of rank {rank}: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:  # no space, no permission, no such file: the message names it
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
