"""The page on several processes: its command parses, and the settings it names exist."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

from triscale.cli.train import train
from triscale.train.config import Runtime, load_settings

PAGE = (Path(__file__).parents[2] / "docs" / "several-processes.md").read_text()


def test_the_command_is_one_of_ours():
    (body,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
    words = shlex.split(body)
    arguments = words[words.index("train") + 1 :]
    context = train.make_context("train", list(arguments))
    assert context.params["run_dir"] == Path("runs/two")
    assert load_settings(overrides=context.params["overrides"]).config.train.tokens == 1_000_000


def test_the_settings_it_names_exist():
    named = set(re.findall(r"--runtime\.(\w+)", PAGE))
    assert named and named <= {field.name for field in fields(Runtime)}
    assert f"{Runtime().checkpoint_seconds:g} by default" in PAGE
