"""Names of a package that load on first use, so that importing the package imports none of its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, exports: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The module functions ``__getattr__`` and ``__dir__`` of ``package``.

    exports: public name -> module of the package that defines it (``"residual"``, ``"delta_rule.step"``).
    """

    def get(name: str) -> Any:
        if name in exports:
            return getattr(import_module(f"{package}.{exports[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(import_module(package)), *exports})

    return get, names
