"""The documentation's tables of measurements, from the committed JSON output of each benchmark: never typed by hand.

Given a folder: one row a ratio of every benchmark. Given one file: that benchmark's methods side by side, against the
peer called "torch".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(folder: Path) -> str:
    """One row a ratio: the command, what it compares with (the ratio's name) and the value."""
    rows = ["| command | ratio | value |", "|---|---|---|"]
    for path in sorted(folder.glob("*.json")):
        measured = json.loads(path.read_text())
        for name, value in measured["ratios"].items():
            shown = f"{value:.2f}" if isinstance(value, (int, float)) else "-"
            rows.append(f"| `python benchmarks/{path.stem}.py` | `{name}` | {shown} |")
    return "\n".join(rows)


def methods(path: Path) -> str:
    """One column a method: how many times as fast as the peer (ratio of medians), then its errors; and the machine."""
    measured = json.loads(path.read_text())
    medians, meta = measured["medians"], measured["meta"]
    cases = [key.removesuffix(".torch") for key in medians if key.endswith(".torch")]
    names = [key.rpartition(".")[2] for key in medians if key.startswith(f"{cases[0]}.")]
    rows = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case in cases:
        error = case.startswith("error.")
        peer = medians[f"{case}.torch"]
        values = [medians.get(f"{case}.{name}") for name in names]
        cells = ["-" if v is None else f"{v:.3f}" if error else f"{peer / v:.2f}" for v in values]
        size = f" ({meta[f'parameters.{case}'] / 1e6:.0f}M)" if f"parameters.{case}" in meta else ""
        rows.append(f"| `{case}`{size} | {' | '.join(cells)} |")
    rows += ["", f"torch {meta['torch']}, {meta['threads']} threads on {meta['cores']} cores"]
    return "\n".join(rows)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    print(methods(given) if given.is_file() else table(given))
