"""A typed Python function as a tool: the signature becomes the JSON schema, the docstring the description."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import PydanticSerializationError

from ...config import ConfigError
from ..types import Outcome, ToolContext, ToolResult


class FunctionTool:
    """A tool made of a function; see :func:`tool`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = None,
        thread: bool = True,
    ):
        self.function, self.timeout = function, timeout
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        self.description = description or _summary(function)
        if not self.description:
            raise ConfigError(
                f"tool {self.name}", "has no description", "Give the function a docstring: the model reads it"
            )
        self._thread = thread and not inspect.iscoroutinefunction(function)
        self._model, self._context = _arguments_model(function, self.name)
        self.parameters: Mapping[str, Any] = _schema(self._model)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Check ``arguments`` against the types, call the function, turn what it returns into text."""
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            return ToolResult(argument_problems(self.name, error), Outcome.FAILED)
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        if self._context:
            values[self._context] = context
        if self._thread:
            returned = await asyncio.to_thread(self.function, **values)
        else:
            returned = self.function(**values)
            if inspect.isawaitable(returned):
                returned = await returned
        return as_result(returned)

    async def close(self) -> None:
        return None


def tool(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a tool of ``function``, or use as a decorator (``@tool`` or ``@tool(timeout=5)``).

    Parameters are typed with anything pydantic knows; describe one with ``Annotated[str, Field(description=...)]``.
    A parameter annotated :class:`ToolContext` receives it and is not shown to the model. A ``str`` goes back as it is,
    a :class:`ToolResult` too, anything else as JSON. Coroutine functions run on the event loop; others run in a thread
    unless ``thread=False``. A thread cannot be stopped: after a timeout it runs on, its result is dropped.

    Options: name, description, timeout (seconds), thread. Raises :class:`ConfigError` for ``*args``, positional-only
    parameters, a missing annotation or a missing docstring.
    """
    if function is None:
        return lambda inner: FunctionTool(inner, **options)
    return FunctionTool(function, **options)


def as_result(value: Any) -> ToolResult:
    """What a function returned, as a tool result."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    if value is None:
        return ToolResult("done")
    try:
        return ToolResult(TypeAdapter(type(value)).dump_json(value).decode())
    except (PydanticSchemaGenerationError, PydanticSerializationError):
        return ToolResult(json.dumps(value, default=str, ensure_ascii=False))


def argument_problems(name: str, error: ValidationError) -> str:
    """Which argument is wrong and why, in one line for the model."""
    problems = []
    for item in error.errors(include_url=False):
        where = ".".join(map(str, item["loc"])) or "arguments"
        problems.append(f"{where}: {item['msg']}")
    return f"{name} was not called: {'; '.join(problems)}"


def _summary(function: Callable[..., Any]) -> str:
    text = inspect.getdoc(function) or ""
    return " ".join(text.split("\n\n")[0].split())


def _arguments_model(function: Callable[..., Any], name: str) -> tuple[type[BaseModel], str | None]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    context = None
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name)
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {name}.{parameter.name}",
                "is *args, **kwargs or positional-only",
                "A model gives arguments by name: write each parameter out",
            )
        if hint is ToolContext:
            context = parameter.name
            continue
        if hint is None:
            raise ConfigError(
                f"tool {name}.{parameter.name}", "has no type annotation", "Write for example `query: str`"
            )
        fields[parameter.name] = (hint, ... if parameter.default is parameter.empty else parameter.default)
    model = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
    return model, context


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    schema.setdefault("properties", {})
    return schema
