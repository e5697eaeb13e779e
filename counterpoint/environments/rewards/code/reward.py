"""The reward function `code`: finds the program in a completion and runs the example's tests against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from reprlib import repr as short_repr
from typing import Any

import orjson

from counterpoint.environments.base import EnvironmentContext, Example
from counterpoint.environments.rewards.base import Attempt, Value
from counterpoint.environments.rewards.code.blocks import code_of
from counterpoint.environments.rewards.code.config import CodeConfig
from counterpoint.environments.rewards.code.functions import FaultyTests, FunctionTests, wall_seconds
from counterpoint.environments.rewards.code.plain_data import encode
from counterpoint.environments.sandbox.python_sandbox import Sandbox

_OUTPUT_BYTES = 1 << 22
_MOST_HANGS = 2
"""Tests that a program may fail by its limit of time before the others count as failed, too."""


class CodeReward:
    """Runs programs in one sandbox for all rollouts of an environment."""

    bounds = (0.0, 1.0)

    def __init__(self, config: CodeConfig, name: str) -> None:
        self._config = config
        self._name = name
        self.columns = frozenset({config.tests_column})  # rows may leave out the others
        self._sandbox = Sandbox(config.sandbox, output_bytes=_OUTPUT_BYTES)

    async def start(self, context: EnvironmentContext) -> None:
        """Starts the sandbox. Raises `SandboxUnavailable` where the machine cannot confine a program."""
        await self._sandbox.start()

    async def close(self) -> None:
        """See `RewardFunction`."""
        await self._sandbox.close()

    async def score(self, attempt: Attempt) -> Value:
        """See `RewardFunction`. Raises `FaultyTests` for tests that cannot be run, and `SandboxUnavailable`."""
        example = attempt.example
        try:
            tests = self._tests(example)
            source = code_of(attempt.completion)
            if source is None:
                return Value(0.0, {"found": 0.0, "passed": 0.0})
            match self._config.style:
                case "stdio":
                    passed = await self._by_output(source, tests)
                case "calls":
                    passed = await self._by_value(source, tests, example)
                case "asserts":
                    passed = await self._by_assertions(source, tests, example)
        except FaultyTests as error:
            raise FaultyTests(f"part {self._name!r}: tests of example {example.index}: {error}") from None
        share = sum(passed) / len(passed)
        value = float(share == 1.0) if self._config.all_or_nothing else share
        return Value(value, {"found": 1.0, "passed": float(sum(passed))})

    def _tests(self, example: Example) -> list[Any]:
        column = self._config.tests_column
        tests = example.info.get(column)
        if self._config.style == "asserts" and isinstance(tests, str):
            tests = [tests]
        if not isinstance(tests, Sequence) or isinstance(tests, str) or not len(tests):
            raise FaultyTests(f"column {column!r} is {_short(tests)}; expected a list of tests")
        return list(tests[: self._config.max_tests])

    async def _by_output(self, source: str, tests: list[Any]) -> list[bool]:
        pairs = [
            (_text(given, i, "input"), _text(out, i, "output")) for i, given, out in _fields(tests, "input", "output")
        ]
        if not any(expected.strip() for _, expected in pairs):
            raise FaultyTests("every test expects no output, so that a program that does nothing passes")
        passed: list[bool] = []
        hangs = 0
        for given, expected in pairs:
            if hangs == _MOST_HANGS:
                passed.append(False)
                continue
            cpu_seconds = self._config.cpu_seconds
            seconds = wall_seconds(cpu_seconds)
            result = await self._sandbox.run(source, given, seconds, self._config.memory_mib, cpu_seconds)
            hangs += bool(result.killed)
            passed.append(result.ok and result.stdout.split() == expected.split())
        return passed

    async def _by_value(self, source: str, tests: list[Any], example: Example) -> list[bool]:
        entry_point = self._entry_point(example)
        fields = list(_fields(tests, "args", "expected"))
        for index, args, _ in fields:
            if not isinstance(args, list | tuple):
                raise FaultyTests(f"test {index}: args is {_short(args)}; expected a list of the function's arguments")
        if all(expected is None for _, _, expected in fields):
            raise FaultyTests("every test expects null, so that a function that does nothing passes")
        sources = [
            f"assert same({entry_point}(*data({_plain(list(args), index)!r})), data({_plain(expected, index)!r}))"
            for index, args, expected in fields
        ]
        return await self._function_tests(source, entry_point).run(sources, "")

    async def _by_assertions(self, source: str, tests: list[Any], example: Example) -> list[bool]:
        for index, test in enumerate(tests):
            if not isinstance(test, str):
                raise FaultyTests(f"test {index} is {_short(test)}; expected Python source")
        column = self._config.setup_column
        setup = None if column is None else example.info.get(column)
        lines = setup if isinstance(setup, list | tuple) else [setup or ""]
        if not all(isinstance(line, str) for line in lines):
            raise FaultyTests(f"column {column!r} is {_short(setup)}; expected Python source, or a list of lines")
        return await self._function_tests(source, self._entry_point(example)).run(tests, "\n".join(lines))

    def _function_tests(self, source: str, entry_point: str | None) -> FunctionTests:
        return FunctionTests(self._sandbox, self._config, source, entry_point)

    def _entry_point(self, example: Example) -> str | None:
        column = self._config.entry_point_column
        entry_point = self._config.entry_point if column is None else example.info.get(column)
        if isinstance(entry_point, str) and entry_point.isidentifier():
            return entry_point
        if entry_point is None and self._config.style == "asserts":
            return None
        raise FaultyTests(f"entry point {entry_point!r} is no name of a function")


def _fields(tests: list[Any], first: str, second: str) -> Iterator[tuple[int, Any, Any]]:
    """Yields index and both fields of each test. Raises `FaultyTests` for one that lacks them."""
    for index, test in enumerate(tests):
        if not isinstance(test, Mapping) or first not in test or second not in test:
            raise FaultyTests(f"test {index} is {_short(test)}; expected a table with {first} and {second}")
        yield index, test[first], test[second]


def _text(value: object, index: int, name: str) -> str:
    """Returns an input or output. An integer has one form as text; what else is no text may have several."""
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise FaultyTests(f"test {index}: {name} is {_short(value)}; expected text")
    return str(value)


def _plain(value: object, index: int) -> str:
    """Returns data for `assertions.data`."""
    text = orjson.dumps(encode(value)).decode()
    if '{"o":' in text:  # within a text, the quotation marks are escaped
        raise FaultyTests(f"test {index}: {_short(value)} holds what is no plain data, or is more than 60 levels deep")
    return text


def _short(value: object) -> str:
    if value is None:
        return "null"
    return f"a {type(value).__name__}, {short_repr(value)}"
