import asyncio
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from triscale.config import ConfigError
from triscale.swarm.tools import tool
from triscale.swarm.types import Outcome, Tool, ToolContext, ToolResult, spec_of

CONTEXT = ToolContext(agent="t1.0", call="t1.0#2.1")


def call(item, arguments):
    return asyncio.run(item.call(arguments, CONTEXT))


@tool(timeout=3)
def convert(value: float, unit: Literal["km", "mi"] = "km", note: Annotated[str, Field(description="why")] = "") -> str:
    """Convert a length.

    Not part of the description.
    """
    return f"{value:g} {unit}"


def test_the_signature_is_the_schema():
    assert isinstance(convert, Tool) and convert.timeout == 3
    spec = spec_of(convert)
    assert (spec.name, spec.description) == ("convert", "Convert a length.")
    assert spec.parameters["required"] == ["value"]
    assert spec.parameters["properties"]["unit"] == {"default": "km", "enum": ["km", "mi"], "type": "string"}
    assert spec.parameters["properties"]["note"]["description"] == "why"
    assert spec.parameters["additionalProperties"] is False


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({}, "value"), ({"value": "many"}, "value"), ({"value": 1, "unit": "ell"}, "unit"), ({"value": 1, "x": 2}, "x")],
)
def test_wrong_arguments_are_answered_not_raised(arguments, named):
    result = call(convert, arguments)
    assert result.outcome is Outcome.FAILED and named in result.content


def test_returns_of_every_kind_become_text():
    @dataclass
    class Point:
        x: int

    def returns(value):
        def give() -> object:
            """Give it."""
            return value

        return call(tool(give), {}).content

    assert returns("text") == "text"
    assert returns({"a": [1, 2]}) == '{"a":[1,2]}'
    assert returns(None) == "done"
    assert returns(Point(3)) == '{"x":3}'
    assert returns(object()).startswith('"<object')


def test_context_goes_to_the_function_and_not_to_the_model():
    @tool
    async def who(context: ToolContext, greeting: str) -> ToolResult:
        """Say who calls."""
        return ToolResult(f"{greeting} {context.agent}", evidence=("x",))

    assert list(who.parameters["properties"]) == ["greeting"]
    assert call(who, {"greeting": "hello"}) == ToolResult("hello t1.0", evidence=("x",))


def test_functions_a_model_cannot_call_are_refused():
    def star(*args: int) -> str:
        """Star."""

    def bare(x) -> str:
        """Bare."""

    def silent(x: int) -> str: ...

    for function, word in ((star, "args"), (bare, "annotation"), (silent, "description")):
        with pytest.raises(ConfigError, match=word):
            tool(function)


def test_blocking_functions_do_not_block_the_loop():
    import time

    @tool
    def slow(x: int) -> int:
        """Wait."""
        time.sleep(0.05)
        return x

    async def go():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        task = asyncio.create_task(tick())
        await asyncio.gather(*(slow.call({"x": i}, CONTEXT) for i in range(4)))
        task.cancel()
        return ticks

    assert asyncio.run(go()) > 2
