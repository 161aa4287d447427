"""Who may import whom, how fast the package imports, and what it pulls in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "triscale"
EVERYONE = {"config", "events"}
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "events": set(),
    "ops": set(),
    "nn": {"ops"},
    "optim": {"ops"},
    "models": {"nn", "ops"},
    "data": set(),
    "train": {"models", "optim", "data"},
    "ladder": {"train"},
    "serve": {"models", "data"},
    "swarm": set(),
    "rl": {"swarm", "serve", "train"},
}
ROOMS = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}


def allowed_rooms(room: str) -> set[str]:
    """A room may import what it lists and, through those, what they list; cli and studies import everything."""
    if room in ("cli", "studies"):
        return ROOMS
    reach, todo = {room}, [room]
    while todo:
        for other in ALLOWED[todo.pop()] - reach:
            reach.add(other)
            todo.append(other)
    return reach | EVERYONE if room not in EVERYONE else {room}


def imported_rooms(path: Path) -> set[str]:
    package = ("triscale", *path.relative_to(SOURCE).parts[:-1])
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            names = [module] if module != "triscale" else [f"triscale.{alias.name}" for alias in node.names]
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "triscale" and len(pieces) > 1 and pieces[1] in ROOMS:
                rooms.add(pieces[1])
    return rooms


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_import_only_what_they_may(room):
    for path in (SOURCE / room).rglob("*.py"):
        forbidden = imported_rooms(path) - allowed_rooms(room)
        assert not forbidden, f"{path.relative_to(SOURCE)} imports {sorted(forbidden)}"


def test_no_import_cycles_between_rooms():
    edges = {room: set().union(*(imported_rooms(p) for p in (SOURCE / room).rglob("*.py"))) - {room} for room in ROOMS}
    done: set[str] = set()
    while len(done) < len(ROOMS):
        free = {room for room in ROOMS - done if edges[room] <= done}
        assert free, f"cycle among {sorted(ROOMS - done)}"
        done |= free


def loaded_modules(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_import_is_light():
    modules = loaded_modules("import triscale")
    assert not {"torch", "numpy", "pydantic"} & modules


def test_help_loads_no_heavy_package():
    statement = "from click.testing import CliRunner\nfrom triscale.cli.main import cli\nCliRunner().invoke(cli, [])"
    assert not {"torch", "numpy", "scipy", "pydantic", "matplotlib"} & loaded_modules(statement)


def test_config_events_and_swarm_never_load_torch():
    statement = "import triscale.config, triscale.events, triscale.swarm, pkgutil, importlib\n"
    statement += "for m in pkgutil.walk_packages(triscale.swarm.__path__, 'triscale.swarm.'):\n"
    statement += "    importlib.import_module(m.name)\n"
    assert "torch" not in loaded_modules(statement)


def test_every_module_imports():
    names = [
        ".".join(("triscale", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in SOURCE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]
    code = "import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in names)
    subprocess.run([sys.executable, "-c", code], check=True)
