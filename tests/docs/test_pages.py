"""Every page is executed: files it shows are written, its commands run (at short settings)."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.M | re.S)

# What makes a documented command short enough for a test; the command itself stays as written.
SHORT = {
    "triscale train": [
        "--train.tokens=2048", "--train.batch_tokens=512", "--train.row_length=64", "--train.micro_batch_tokens=512",
        "--train.eval_tokens=256", "--model.width=16", "--model.depth=2", "--data.vocabulary_size=512",
    ],
    "triscale ladder run": [
        "--seeds=[0, 1]", "--base.train.batch_tokens=256", "--base.train.row_length=64",
        "--base.train.micro_batch_tokens=256", "--base.train.eval_tokens=256",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small corpus in place of the standard library, so that no page waits for twelve megabytes."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        (folder / f"{number}.py").write_text("\n".join(f"def f{i}(x):\n    return x + {i * number}" for i in range(40)))
    return folder


def run_page(path: Path, folder: Path, corpus: Path) -> int:
    """Execute a page's blocks in ``folder``; returns how many it ran."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT / 'src'}"
    ran = 0
    for language, info, body in FENCE.findall(path.read_text()):
        target = re.search(r"file=(\S+)", info)
        if target:
            (folder / target[1]).write_text(shorten_ladder(body) if target[1].endswith(".toml") else body)
        elif language == "python" and "run" in info:
            subprocess.run([sys.executable, "-c", body], cwd=folder, env=environment, check=True, capture_output=True)
        elif language == "bash":
            for line in body.strip().splitlines():
                line = line.removeprefix("PYTHONPATH=. ").split("  #")[0]
                if line.startswith("triscale "):
                    execute(line, folder, environment, corpus)
                    ran += 1
        ran += 1
    return ran


def shorten_ladder(text: str) -> str:
    return re.sub(r"tokens = [\d_]+$", "tokens = 2048", text, flags=re.M).replace(
        "vocabulary_size = 1024", "vocabulary_size = 512"
    )


def execute(line: str, folder: Path, environment: dict, corpus: Path) -> None:
    arguments = shlex.split(line)
    prefix = " ".join(arguments[:3]) if arguments[1] in ("ladder",) else " ".join(arguments[:2])
    extra = list(SHORT.get(prefix, []))
    source = f"corpus={{kind = 'files', paths = ['{corpus}']}}"
    if prefix == "triscale train":
        extra.append(f"--data.{source}")
    elif arguments[1] == "ladder" and arguments[2] in ("run", "plan", "tune"):
        extra.append(f"--base.data.{source}")
    command = [sys.executable, "-m", *arguments, *extra]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_own_parts_page(tmp_path, corpus):
    assert run_page(ROOT / "docs" / "own-parts.md", tmp_path, corpus) >= 5
    assert (tmp_path / "runs" / "average-ladder" / "report" / "index.html").exists()


def test_readme_commands_run(tmp_path, corpus):
    assert run_page(ROOT / "README.md", tmp_path, corpus) >= 6


def test_tables_are_those_of_the_committed_records():
    """Whatever stands between the markers is what the named command prints."""
    from click.testing import CliRunner

    from triscale.cli.main import cli

    block = re.compile(r"<!-- begin: triscale (.+?) -->\n(.*?)<!-- end -->", re.S)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [found for page in pages for found in block.findall(page.read_text())]
    assert blocks
    for command, body in blocks:
        arguments = [str(ROOT / word) if word.startswith("docs/") else word for word in shlex.split(command)]
        printed = CliRunner().invoke(cli, arguments, catch_exceptions=False).output
        assert body.strip() == printed.strip(), command


def test_speed_tables_are_those_of_the_committed_measurements():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    block = re.compile(r"<!-- begin: python benchmarks/_table.py (\S+) -->\n(.*?)<!-- end -->", re.S)
    found = [(page.name, *match) for page in pages for match in block.findall(page.read_text())]
    assert {"README.md", "muonclip.md"} <= {name for name, _, _ in found}
    for name, source, body in found:
        command = [sys.executable, str(ROOT / "benchmarks" / "_table.py"), str(ROOT / source)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert body.strip() == printed.strip(), f"{name}: paste what `python benchmarks/_table.py {source}` prints"


def test_the_table_of_methods_takes_whatever_methods_were_measured(tmp_path):
    path = tmp_path / "muon_step.json"
    medians = {
        "a.torch": 2.0,
        "a.new3": 1.0,
        "a.old": 4.0,
        "error.x.torch": 0.3,
        "error.x.new3": 0.1,
        "alone.new3": 1.0,
    }
    meta = {"torch": "9.9", "threads": 1, "cores": 3, "parameters.a": 2_000_000}
    path.write_text(json.dumps({"meta": meta, "medians": medians, "ratios": {}}))
    command = [sys.executable, str(ROOT / "benchmarks" / "_table.py"), str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed[0] == "| | torch | new3 | old |" and printed[2] == "| `a` (2M) | 1.00 | 2.00 | 0.50 |"
    assert printed[3] == "| `error.x` | 0.300 | 0.100 | - |" and len(printed) == 6


def test_readme_links_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_public_markdown_names_no_other_place():
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"/(tmp|root)/", path.read_text()), path
