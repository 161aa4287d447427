"""The README's table of measured ratios, from the committed JSON output of each benchmark: never typed by hand."""

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


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
