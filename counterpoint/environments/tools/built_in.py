"""The built-in tools: `calculator`, which is safe arithmetic, and `python`, which runs a program in the sandbox."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from counterpoint.environments.sandbox.python_sandbox import Sandbox, SandboxUnavailable
from counterpoint.environments.tools.definition import ToolError, ToolFunction, ToolUnavailable, tool_from

MAX_EXPRESSION = 500
MAX_DIGITS = 1000
"""The digits of a whole number, in a result or on the way to it."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _round(number: float, digits: int = 0) -> float:
    if abs(digits) > MAX_DIGITS:
        raise ToolError(f"round: at most {MAX_DIGITS} digits")
    return round(number, digits) if digits else round(number)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "floor": math.floor, "ceil": math.ceil, "gcd": math.gcd,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> int | float:
    """Returns the value of an arithmetic expression: numbers, + - * / // % **, brackets, and a few functions.

    Raises `ToolError`, for the model to read. Nothing else is evaluated, and no number grows beyond `MAX_DIGITS`.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_EXPRESSION} are allowed")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression!r} is no arithmetic: {error}") from None
    if isinstance(value, int | float):
        return value
    raise ToolError("the result is not a real number")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _bounded(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ToolError(f"{ast.unparse(node)!r} is no arithmetic; functions are {', '.join(_FUNCTIONS)}")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        digits = exponent * max(base.bit_length() - 1, 0) * math.log10(2)
        if digits > MAX_DIGITS or exponent > 10**6:
            raise ToolError(f"the result has more than {MAX_DIGITS} digits")
    return _bounded(base**exponent)


def _bounded(number: Any) -> Any:
    if isinstance(number, int) and number.bit_length() > MAX_DIGITS / math.log10(2) + 1:
        raise ToolError(f"the result has more than {MAX_DIGITS} digits")
    return number


async def _calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: such as (3 + 4) * 12
    """
    return str(calculate(expression))


def calculator_tool(name: str = "calculator") -> ToolFunction:
    """Returns the tool `calculator(expression)`."""
    return tool_from(_calculator, name)


def python_tool(sandbox: Sandbox, seconds: float = 10.0, memory_mib: int = 512, name: str = "python") -> ToolFunction:
    """Returns the tool `python(code)`: each call runs a program by itself, and returns what it prints."""

    async def python(code: str) -> str:
        """Runs a Python program and returns what it prints. Nothing is kept between calls.

        Args:
            code: the program. It must print its results.
        """
        try:
            result = await sandbox.run(code, seconds=seconds, memory_mib=memory_mib)
        except SandboxUnavailable as error:
            raise ToolUnavailable(str(error)) from error
        said = result.stdout + result.stderr
        if result.killed:
            reason = f"it took longer than {seconds:g} s" if result.killed == "deadline" else result.killed
            raise ToolError(f"the program was killed: {reason}\n{said}")
        if not result.ok:
            raise ToolError(f"the program failed with exit code {result.exit_code}\n{said}")
        return said

    return tool_from(python, name)
