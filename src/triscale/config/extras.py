"""Optional dependencies: import them here so that a missing one prints the exact pip line."""

from importlib import import_module
from types import ModuleType

from .errors import MissingExtraError


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import ``module`` or raise :class:`MissingExtraError` that names the extra which carries it."""
    try:
        return import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != top:
            raise  # the package is there, something below it is broken: hide nothing
        raise MissingExtraError(top, extra, purpose) from error
