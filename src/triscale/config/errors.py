"""Errors shown to a user: each names the field, the value and the fix."""


class TriScaleError(Exception):
    """Base of all errors that a user can act on; the command line prints it without a traceback."""


class ConfigError(TriScaleError):
    """A configuration value is unknown, of the wrong type or out of range."""

    def __init__(self, path: str, problem: str, fix: str = ""):
        self.path, self.problem, self.fix = path, problem, fix
        super().__init__(f"{path}: {problem}" + (f". {fix}" if fix else ""))


class MissingExtraError(TriScaleError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        self.package, self.extra = package, extra
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'triscale[{extra}]'"
        )
