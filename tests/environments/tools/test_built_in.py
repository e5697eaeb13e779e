"""The calculator computes arithmetic and nothing else, within bounds; the Python tool says what a program did."""

from __future__ import annotations

import math
from typing import Any

import pytest

from counterpoint.environments.sandbox.python_sandbox import Result, Sandbox, SandboxUnavailable
from counterpoint.environments.tools.built_in import calculate, calculator_tool, python_tool
from counterpoint.environments.tools.definition import ToolError, ToolUnavailable


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        (" -(2 ^ 3) // 3 ", -3),
        ("7 / 2", 3.5),
        ("2 ** 100", 2**100),
        ("sqrt(16) + max(1, 2) + abs(-3)", 9.0),
        ("pi", math.pi),
        ("0x10 + 1_000", 1016),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "1/0", "9**9**9", "2**10000000", "(10**999)*(10**999)", "1 if 1 else 2", "'a' * 9", "__import__('os')",
        "().__class__", "abs.__class__", "max(*[1])", "round(1, ndigits=2)", "(-8) ** 0.5", "log(-1)", "a", "True", "1j",
        "(" * 400, "1" * 501, "exp(1000)", "round(1, -99999999999)", "round(2**9999)", "min()", "lambda: 1", "[1]", "x := 1",
        "1\n2",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


async def test_the_tool_answers_text() -> None:
    assert await calculator_tool().call({"expression": "1 + 1"}, {}) == "2"


class FixedSandbox(Sandbox):
    """Every program has the same result."""

    def __init__(self, result: Result | None) -> None:
        self._result = result

    async def run(self, *args: Any, **kwargs: Any) -> Result:
        if self._result is None:
            raise SandboxUnavailable("no namespaces")
        return self._result


async def ask(result: Result | None) -> Any:
    return await python_tool(FixedSandbox(result)).call({"code": "print(1)"}, {})


async def test_the_python_tool() -> None:
    assert await ask(Result("1\n", "a warning\n", 0, "", 0.1)) == "1\na warning\n"
    with pytest.raises(ToolError, match="exit code 1\nError"):
        await ask(Result("", "Error", 1, "", 0.1))
    with pytest.raises(ToolError, match="longer than 10 s"):
        await ask(Result("", "", None, "deadline", 0.1))
    with pytest.raises(ToolUnavailable, match="no namespaces"):
        await ask(None)
