"""Runs the tests of an example against recorded outcomes of calls. Runs inside a sandbox of its own: no code of a model is in it.

A function under test is a stand-in that looks up what a call returned. A call whose outcome is not recorded yet is noted, and
the test goes on with an unknown value, to note further calls at once; its outcome then does not count. The caller
(`functions.py`) has the noted calls made and runs this again, until nothing is unknown.
"""

import ast
import builtins
import json
import signal
import sys
from typing import Any

from environments.rewards.code.plain_data import Opaque, decode, encode

_DEEPER = 40
"""Levels that a test may put around what a call returned: a value that is too deep is then still known as the program's."""


class _Stop(BaseException):
    """Ends a test: it took too long, or cannot go on with an unknown value."""


class CandidateError(Exception):
    """What a function under test raised, if that is no exception of Python's own."""


class _Unknown:
    """A value that is not known yet. Whatever is done with it is not known, either."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0

    def __int__(self) -> int:
        return 0

    def __contains__(self, item: object) -> bool:
        return True


def _unknown(*args: Any) -> Any:
    return _Unknown()


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(_Unknown, f"__{_name}__", _unknown)
    setattr(_Unknown, f"__r{_name}__", _unknown)
for _name in ("lt", "le", "gt", "ge", "neg", "abs", "round", "getitem"):
    setattr(_Unknown, f"__{_name}__", _unknown)


class _Test:
    """One test while it runs."""

    def __init__(self, known: dict[str, Any], noted: dict[str, Any]) -> None:
        self.known = known
        self.noted = noted
        self.is_open = False
        """It used an unknown value."""
        self.has_failed = False
        """A call failed in a way that a test cannot catch."""
        self.raised: list[BaseException] = []

    def stand_in(self, name: str) -> Any:
        """Returns the stand-in of a function."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(value, _Unknown) for value in (*args, *kwargs.values())):
                self.is_open = True
                raise _Stop
            call = {
                "name": name,
                "args": [encode(value, -_DEEPER) for value in args],
                "kwargs": {key: encode(value, -_DEEPER) for key, value in kwargs.items()},
            }
            key = json.dumps(call, sort_keys=True)
            if f'{{"o": "{Opaque.__name__}"' in key:  # what another call returned
                self.has_failed = True
                raise _Stop
            if '{"o":' in key:
                raise TypeError(f"{name} is called with something that is no plain data")
            outcome = self.known.get(key)
            if outcome is None:
                self.noted[key] = call
                self.is_open = True
                return _Unknown()
            return self._returned(outcome, args)

        called.__name__ = name
        return called

    def _returned(self, outcome: Any, args: tuple[Any, ...]) -> Any:
        if "value" in outcome:
            for value, after in zip(args, outcome.get("after", ()), strict=False):
                _update(value, decode(after))
            return decode(outcome["value"])
        if "raised" not in outcome:
            self.has_failed = True
            raise _Stop
        kind: Any = getattr(builtins, str(outcome["raised"]), None)
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        text = str(outcome.get("text", ""))
        try:
            error = kind(text) if is_error else CandidateError(f"{outcome['raised']}: {text}")
        except TypeError:  # as UnicodeDecodeError, which takes more
            error = CandidateError(text)
        self.raised.append(error)
        raise error


def _update(value: Any, after: Any) -> None:
    """Changes an argument as the function changed it."""
    if type(value) is not type(after):
        return
    if isinstance(value, list):
        value[:] = after
    elif isinstance(value, dict | set):
        value.clear()
        value.update(after)


def same(found: Any, expected: Any) -> bool:
    """Compares with data of JSON: a tuple is a list there, and a number a float or not."""
    if isinstance(found, tuple):
        found = list(found)
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = {str(key): key for key in found}
        return keys.keys() == expected.keys() and all(same(found[keys[key]], expected[key]) for key in expected)
    numbers = (int, float)
    if (
        isinstance(expected, numbers)
        and isinstance(found, numbers)
        and isinstance(expected, bool) == isinstance(found, bool)
    ):
        return found == expected or abs(found - expected) <= 1e-9 * max(abs(found), abs(expected))
    if isinstance(found, _Unknown):
        return True
    return type(found) is type(expected) and bool(found == expected)


def _called_names(*sources: str) -> set[str]:
    """Returns the names that sources call and that nothing there defines."""
    called: set[str] = set()
    defined = set(dir(builtins))
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).partition(".")[0])
    return called - defined - {"same"}


def _run(test: _Test, source: str, setup: str, entry_point: str | None, cpu_seconds: float) -> str:
    """Returns `passed`, `failed`, `open`, or `fault: ` and what is wrong with the test itself."""
    namespace: dict[str, Any] = {"__name__": "tests", "same": same}
    try:
        names = _called_names(setup, source) | ({entry_point} if entry_point else set())
        programs = [compile(text, "tests", "exec") for text in (setup, source)]
    except SyntaxError as error:
        return f"fault: {error}"
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        namespace.update({name: test.stand_in(name) for name in names})
        for program in programs:
            exec(program, namespace)
        if entry_point and callable(namespace.get("check")):
            namespace["check"](namespace[entry_point])
    except BaseException as error:  # noqa: BLE001 - a test fails by raising whatever it likes
        if test.is_open:
            return "open"
        if isinstance(error, NameError | ImportError | TypeError) and error not in test.raised and not test.has_failed:
            is_ours = not isinstance(error, TypeError) or "no plain data" in str(error)
            return f"fault: {type(error).__name__}: {error}"[:300] if is_ours else "failed"
        return "failed"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "open" if test.is_open else "failed" if test.has_failed else "passed"


def _expire(number: int, frame: object) -> None:
    raise _Stop


def main() -> None:
    """Reads the tests and the outcomes known so far; prints the tests' outcomes and the calls to be made."""
    request = json.loads(sys.stdin.buffer.read())
    output, sys.stdout = sys.stdout, sys.stderr
    signal.signal(signal.SIGPROF, _expire)
    known = dict(request["known"])
    noted: dict[str, Any] = {}
    outcomes = [
        _run(_Test(known, noted), source, request["setup"], request["entry_point"], request["cpu_seconds"])
        for source in request["tests"]
    ]
    output.write(json.dumps({"outcomes": outcomes, "noted": list(noted.items())}))
    output.flush()


if __name__ == "__main__":
    main()
