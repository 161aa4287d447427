"""The example on the delta rule's page runs, and the page keeps to the limits the code has."""

import re
import subprocess
import sys
from pathlib import Path

from triscale.ops.delta_rule.halved import LIMIT, TILE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "delta-rule.md").read_text()


def test_the_example_runs():
    blocks = re.findall(r"^```python run\n(.*?)^```", PAGE, re.M | re.S)
    assert blocks
    for block in blocks:
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{block}"], check=True
        )


def test_the_page_states_the_limits_in_force():
    assert f"stays within {LIMIT:g} in absolute value" in " ".join(PAGE.split())
    assert f"tiles of {TILE}" in PAGE
