"""The reward function `code`: finds the program in a completion and runs the example's tests against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environments.base import EnvironmentContext, Example
from environments.rewards.base import Attempt, Value
from environments.rewards.code.config import CodeConfig
from environments.rewards.code.extract import code_of
from environments.rewards.code.functions import FaultyTests, FunctionTests, wall_seconds
from environments.tools.sandbox.python_sandbox import Sandbox

_OUTPUT_BYTES = 1 << 22
_TOO_LONG = 152
"""The exit code of a program that took too much processor time."""
_MOST_HANGS = 2
"""Tests that a program may fail by its limit of time before the others count as failed, too."""


class CodeReward:
    """Runs programs in one sandbox for all rollouts of an environment."""

    def __init__(self, config: CodeConfig, name: str) -> None:
        self._config = config
        self._name = name
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
        tests = self._tests(example)
        source = code_of(attempt.completion)
        if source is None:
            return Value(0.0, {"found": 0.0, "passed": 0.0})
        try:
            if self._config.style == "stdio":
                passed = await self._by_output(source, tests, example)
            else:
                passed = await self._by_value(source, tests, example)
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
            raise FaultyTests(
                f"part {self._name!r}: column {column!r} of example {example.index} is {type(tests).__name__}; "
                "expected a list of tests"
            )
        return list(tests[: self._config.max_tests])

    async def _by_output(self, source: str, tests: list[Any], example: Example) -> list[bool]:
        program = _with_limit(source, self._config.cpu_seconds)
        pairs = [_fields(test, ("input", "output"), index) for index, test in enumerate(tests)]
        passed: list[bool] = []
        hangs = 0
        for given, expected in pairs:
            if hangs == _MOST_HANGS:
                passed.append(False)
                continue
            seconds = wall_seconds(self._config.cpu_seconds)
            result = await self._sandbox.run(program, str(given), seconds, self._config.memory_mib)
            hangs += bool(result.killed) or result.exit_code == _TOO_LONG
            passed.append(result.ok and result.stdout.split() == str(expected).split())
        return passed

    async def _by_value(self, source: str, tests: list[Any], example: Example) -> list[bool]:
        config = self._config
        entry_point = config.entry_point
        if config.entry_point_column is not None:
            entry_point = example.info.get(config.entry_point_column)
        if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
            raise FaultyTests(f"entry point {entry_point!r} is no name of a function")
        setup = ""
        if config.style == "calls":
            pairs = [_fields(test, ("args", "expected"), index) for index, test in enumerate(tests)]
            sources = [f"assert same({entry_point}(*{list(args)!r}), {expected!r})" for args, expected in pairs]
        else:
            sources = [str(test) for test in tests]
            if config.setup_column is not None:
                setup = str(example.info.get(config.setup_column) or "")
        return await FunctionTests(self._sandbox, config, source, entry_point).run(sources, setup)


def _fields(test: object, names: tuple[str, str], index: int) -> tuple[Any, Any]:
    if not isinstance(test, Mapping) or any(name not in test for name in names):
        raise FaultyTests(f"test {index} is {str(test)[:100]!r}; expected a table with {' and '.join(names)}")
    return test[names[0]], test[names[1]]


def _with_limit(source: str, cpu_seconds: float) -> str:
    """Returns a program that ends after so much processor time, and that is otherwise `source`.

    A program may undo that: the sandbox's deadline then ends it. A signal alone does not end the first process of a namespace.
    """
    return (
        "import os, signal\n"
        f"signal.signal(signal.SIGPROF, lambda *_, leave=os._exit: leave({_TOO_LONG}))\n"
        f"signal.setitimer(signal.ITIMER_PROF, {cpu_seconds!r})\n"
        "del os, signal\n"
        f"exec(compile({source!r}, 'solution.py', 'exec'))\n"
    )
