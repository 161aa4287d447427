"""What the pages of studies share: the command that makes them again, Markdown tables, figures that do not change."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from triscale.config import require
from triscale.train.run_directory import environment, write_json


def command_line(name: str, run: Callable[..., Any], settings: dict[str, Any]) -> str:
    """``triscale study NAME --a.b=VALUE``: what differs from the defaults of ``run``, without the runtime."""
    words = ["triscale study", name]
    for key, parameter in signature(run).parameters.items():
        if key not in ("output", "runtime") and key in settings and settings[key] != parameter.default:
            words += [shlex.quote(f"--{path}={json.dumps(value)}") for path, value in _leaves(key, settings[key])]
    return " ".join(words)


def defaults(run: Callable[..., Any]) -> dict[str, Any]:
    """The settings of a study's ``run`` as they stand without any."""
    return {key: p.default for key, p in signature(run).parameters.items() if key != "output"}


def _leaves(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path, value


def header(question: str, command: str, settings: dict[str, Any]) -> dict[str, Any]:
    """How every results.json begins: what was asked, how to ask it again, and where this was measured."""
    shown = {key: value for key, value in settings.items() if key not in ("output", "runtime")}
    return {"question": question, "command": command, "settings": shown, "environment": environment()}


def write_page(output: Path, results: dict[str, Any], text: str) -> None:
    """results.json, and the README.md made from it."""
    write_json(output / "results.json", results)
    (output / "README.md").write_text(text, encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is words, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def pyplot() -> Any:
    """matplotlib without a display, writing the same bytes for the same data; raises ``MissingExtraError``."""
    matplotlib = require("matplotlib", "report", "the figure of this study")
    matplotlib.use("Agg")
    plt = require("matplotlib.pyplot", "report", "the figure of this study")
    plt.rcParams.update({"svg.hashsalt": "triscale", "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False})  # fmt: skip
    return plt


def save_figure(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)
