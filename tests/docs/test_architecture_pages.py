"""The pages on depth attention and experts: their Python runs, the options they name exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from triscale.train.config import load_settings

ROOT = Path(__file__).parents[2]
PAGES = ["attention-residuals.md", "mixture-of-experts.md"]


@pytest.mark.parametrize("name", PAGES)
def test_python_blocks_run_and_commands_resolve(name, tmp_path):
    text = (ROOT / "docs" / name).read_text()
    blocks = re.findall(r"^```python run\n(.*?)^```", text, re.M | re.S)
    commands = [line for body in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in body.splitlines()]
    assert blocks and commands
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, env={"PYTHONPATH": str(ROOT / "src")})
    for command in commands:
        overrides = [word for word in command.split() if word.startswith("--model.")]
        load_settings(overrides=overrides)


def test_fields_in_the_table_exist():
    from dataclasses import fields

    from triscale.nn.mixture_of_experts import MixtureOfExperts

    text = (ROOT / "docs" / "mixture-of-experts.md").read_text()
    rows = re.findall(r"^\| (`.+?) \|", text, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named and named <= {field.name for field in fields(MixtureOfExperts.Config)}
