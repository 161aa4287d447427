"""TriScale: token efficiency, long context and agent swarms as drop-in parts, with a ladder that measures them.

Submodules load on first use, so ``import triscale`` stays fast and pulls in no optional dependency.
"""

from importlib import import_module

__version__ = "0.1.0"

_SUBMODULES = (
    "config", "events", "ops", "nn", "optim", "models", "data", "train", "ladder", "serve", "swarm", "rl", "studies",
)  # fmt: skip


def __getattr__(name: str):
    if name in _SUBMODULES:
        return import_module(f"triscale.{name}")
    raise AttributeError(f"module 'triscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES])
