"""Tests functions of a program. It and the tests run in sandboxes of their own, and only plain data crosses between them.

`candidate.py` makes calls beside the program, and `assertions.py` runs the tests without it. So the program can return a wrong
value or none; it cannot reach a test, what it expects, or the outcome.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from counterpoint.environments.rewards.code.config import CodeConfig
from counterpoint.environments.sandbox.python_sandbox import Sandbox

_HERE = Path(__file__).parent
_MOST_ROUNDS = 40
_MOST_CALLS = 2000
_MOST_BYTES = 4 << 20
"""The size of all outcomes together, which the tests are given."""

_MOST_RUNS = 4
"""Runs of the program in one round: it may end at a call, and the calls after it are made anew."""


_BY_ITS_WORK = ("deadline", "output")
"""Why a run is killed because of what it does, and not of the machine."""


class FaultyTests(ValueError):
    """The tests of an example cannot be run, whatever the program is."""


def _program(name: str) -> str:
    """Returns the source of a program of this folder, with the module that it imports from here."""
    module = "counterpoint.environments.rewards.code.plain_data"
    return (
        "import sys, types\n"
        f"module = sys.modules[{module!r}] = types.ModuleType({module!r})\n"
        f"exec(compile({(_HERE / 'plain_data.py').read_text()!r}, 'plain_data.py', 'exec'), module.__dict__)\n"
        f"exec(compile({(_HERE / name).read_text()!r}, {name!r}, 'exec'))\n"
    )


_CANDIDATE = _program("candidate.py")
_ASSERTIONS = _program("assertions.py")


def wall_seconds(cpu_seconds: float) -> float:
    """Returns the deadline of something that may use `cpu_seconds`.

    Far later, since a busy machine must not change a reward; not later than needed, since a program may sleep.
    """
    return 10.0 + 2 * cpu_seconds


class FunctionTests:
    """The tests of one example and one program."""

    def __init__(self, sandbox: Sandbox, config: CodeConfig, source: str, entry_point: str | None) -> None:
        self._sandbox = sandbox
        self._config = config
        self._source = source
        self._entry_point = entry_point
        self._known: dict[str, Any] = {}
        self._room = _MOST_BYTES

    async def run(self, tests: Sequence[str], setup: str) -> list[bool]:
        """Returns which tests pass. Raises `FaultyTests`.

        A test fails whose calls come to no end because of what the program returned: it may loop over that, or until it is done.
        """
        for _ in range(_MOST_ROUNDS):
            outcomes, noted = await self._assert(tests, setup)
            is_program = bool(self._known)
            if not noted or (is_program and len(self._known) + len(noted) > _MOST_CALLS):
                return [outcome == "passed" for outcome in outcomes]
            if len(noted) > _MOST_CALLS:
                raise FaultyTests(f"the tests make more than {_MOST_CALLS} different calls")
            await self._call(noted)
        left = [test for test, outcome in zip(tests, outcomes, strict=True) if outcome == "open"]
        if all("while" in test for test in left):
            return [outcome == "passed" for outcome in outcomes]
        raise FaultyTests(f"the tests make calls that depend on one another more than {_MOST_ROUNDS} deep")

    async def _assert(self, tests: Sequence[str], setup: str) -> tuple[list[str], dict[str, Any]]:
        config = self._config
        request = {
            "tests": list(tests),
            "setup": setup,
            "entry_point": self._entry_point,
            "known": list(self._known.items()),
            "cpu_seconds": config.cpu_seconds,
            "proves": config.style == "asserts" and not self._known,
        }
        seconds = wall_seconds(config.cpu_seconds * len(tests))
        result = await self._sandbox.run(_ASSERTIONS, orjson.dumps(request).decode(), seconds, config.memory_mib)
        try:
            answer = orjson.loads(result.stdout)
            outcomes, noted = answer["outcomes"], dict(answer["noted"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            if self._known and (result.killed in _BY_ITS_WORK or "MemoryError" in result.stderr):
                return ["failed"] * len(tests), {}  # it ran before it was given what the program returned
            raise FaultyTests(f"the tests did not run: {result.killed or result.stderr[-500:]}") from None
        for index, outcome in enumerate(outcomes):
            if outcome.startswith("fault"):
                raise FaultyTests(f"test {index}: {outcome.removeprefix('fault: ')}")
        return outcomes, noted

    async def _call(self, noted: dict[str, Any]) -> None:
        """Makes calls, and makes those again that came after one at which the program ended."""
        left = dict(noted)
        for _ in range(_MOST_RUNS):
            outcomes, how = await self._call_once(list(left.values()))
            for key, (outcome, size) in zip(list(left), outcomes, strict=False):
                self._room -= size
                self._known[key] = (
                    outcome if self._room >= 0 else {"failed": "what it returned is too large, with all before"}
                )
                del left[key]
            if not left:
                return
            if how == "deadline":
                break
            ended_at = next(iter(left))
            self._known[ended_at] = {"failed": f"the program ended: {how}"}
            del left[ended_at]
        for key in left:
            self._known[key] = {"failed": "the program ended at earlier calls"}

    async def _call_once(self, calls: list[Any]) -> tuple[list[tuple[dict[str, Any], int]], str]:
        config = self._config
        mark = secrets.token_hex(8)
        request = {"source": self._source, "calls": calls, "cpu_seconds": config.cpu_seconds, "mark": mark}
        seconds = wall_seconds(config.cpu_seconds)
        result = await self._sandbox.run(_CANDIDATE, orjson.dumps(request).decode(), seconds, config.memory_mib)
        outcomes = [_outcome(line.removeprefix(mark)) for line in result.stdout.split("\n") if line.startswith(mark)]
        return outcomes[: len(calls)], result.killed or result.stderr[-200:] or "by itself"


def _outcome(line: str) -> tuple[dict[str, Any], int]:
    """Returns an outcome as `candidate.py` writes one, and its size. The program may have written something else there."""
    try:
        outcome = orjson.loads(line)
        size = len(orjson.dumps(outcome))  # which refuses what is nested deeper than any outcome of `candidate.py`
    except (orjson.JSONDecodeError, TypeError):
        outcome, size = None, 0
    if not isinstance(outcome, dict) or not isinstance(outcome.get("after", []), list):
        return {"failed": "the program wrote among the outcomes"}, 0
    return outcome, size
