"""The wheel works outside the source tree and carries its data."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_wheel_carries_ladders_and_templates_and_runs(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "triscale/ladders/demo.toml" in names and "triscale/ladder/templates/report.html" in names
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = (
        "import triscale; print(triscale.__file__)\nfrom triscale.ladder.config import load_ladder; load_ladder('demo')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))


def test_constraints_pin_the_tested_torch():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    assert not any(line.startswith("torchvision") for line in lines)
