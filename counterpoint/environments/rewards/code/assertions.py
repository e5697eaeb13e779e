"""Runs the tests of an example against recorded outcomes of calls. Runs inside a sandbox of its own: no code of a model is in it.

A function under test is a stand-in that looks up what a call returned. A call whose outcome is not recorded yet is noted, and
the test goes on with an unknown value, to note further calls at once; its outcome then does not count. The caller
(`functions.py`) has the noted calls made and runs this again, until nothing is unknown.
"""

import ast
import builtins
import json
import math
import random
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from counterpoint.environments.rewards.code.plain_data import Opaque, decode, encode

_DEEPER = 40
"""Levels that a test may put around what a call returned: a value that is too deep is then still known as the program's."""

_MOST_CALLS = 1000
"""The most calls with an unknown outcome in one run of a test."""
_PROOF_SECONDS = 1.0
"""Processor time after which a test without a program counts as one that can fail."""

_EXACT_INTEGERS = 2.0**53

_RANDOM = random.Random(0).getstate()
"""The generator's state with which each run of a test begins, so that its calls with random arguments are the same ones."""


class _Stop(BaseException):
    """Ends a test: it took too long, or cannot go on with an unknown value."""


class CandidateError(Exception):
    """What a function under test raised, if that is no exception of Python's own."""


class _Any:
    """Stands for what a function returned, and for whatever is made of it. All comparisons with it hold, or none does."""

    def __init__(self, holds: bool) -> None:
        self._holds = holds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def __eq__(self, other: object) -> bool:
        return self._holds

    def __ne__(self, other: object) -> bool:
        return self._holds

    __hash__ = object.__hash__

    def __iter__(self) -> Any:
        return iter(() if self._holds else (self,))

    def __bool__(self) -> bool:
        return self._holds

    def __len__(self) -> int:
        return 0 if self._holds else 1

    def __float__(self) -> float:
        return 0.0 if self._holds else math.nan

    def __int__(self) -> int:
        return 0 if self._holds else 7919

    __index__ = __int__

    def __contains__(self, item: object) -> bool:
        return self._holds


def _itself(value: Any, *others: Any) -> Any:
    return value


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(_Any, f"__{_name}__", _itself)
    setattr(_Any, f"__r{_name}__", _itself)
for _name in ("lt", "le", "gt", "ge", "neg", "abs", "round", "getitem"):
    setattr(_Any, f"__{_name}__", _itself)


class _Own:
    """Stands for what a wrong but repeatable program returns: equal only to what the same call gives, and the same made of it."""

    def __init__(self, made_of: object, is_high: bool) -> None:
        """`is_high` says whether it is true and more than any other value, or false, less and no number."""
        self._made_of = hash(made_of)
        self._is_high = is_high

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Own) and self._made_of == other._made_of

    def __hash__(self) -> int:
        return self._made_of

    def __repr__(self) -> str:
        return f"<{self._made_of}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._made(f".{name}")

    def __iter__(self) -> Any:
        return iter((self._made("first"), self._made("second")))

    def __contains__(self, item: object) -> bool:
        return False

    def __len__(self) -> int:
        return 2

    def __bool__(self) -> bool:
        return self._is_high

    def __lt__(self, other: object) -> bool:
        return self != other and not self._is_high

    def __le__(self, other: object) -> bool:
        return self == other or not self._is_high

    def __gt__(self, other: object) -> bool:
        return self != other and self._is_high

    def __ge__(self, other: object) -> bool:
        return self == other or self._is_high

    def __float__(self) -> float:
        return self._made_of % 7919 + 0.125 if self._is_high else math.nan

    def __int__(self) -> int:
        return self._made_of % 7919

    __index__ = __int__

    def _made(self, how: str, *others: object) -> Any:
        return _Own((self._made_of, how, repr(others)), self._is_high)


_OF_ITSELF = {"sub": 0, "mod": 0, "xor": 0, "truediv": 1, "floordiv": 1}
"""What any number gives with itself."""


def _derived(name: str) -> Any:
    def method(value: _Own, *others: object) -> Any:
        return _OF_ITSELF[name] if name in _OF_ITSELF and others == (value,) else value._made(name, *others)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(_Own, f"__{_name}__", _derived(_name))
    setattr(_Own, f"__r{_name}__", _derived(f"r{_name}"))
for _name in ("neg", "abs", "round", "getitem", "call"):
    setattr(_Own, f"__{_name}__", _derived(_name))


class _Equal(_Any):
    """Equals everything, and differs from nothing. Its order beside itself is unknown."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__

    def __lt__(self, other: object) -> bool:
        if isinstance(other, _Equal):
            raise TypeError
        return True

    __gt__ = __lt__


class _Test:
    """One test while it runs, with what is known of the program's calls."""

    def __init__(self, known: dict[str, Any], noted: dict[str, Any]) -> None:
        self.known = known
        self.noted = noted
        self.calls = 0
        """How many whose outcome depends on unknown values."""
        self.is_open = False
        """It used an unknown value."""
        self.has_failed = False
        """A call failed in a way that a test cannot catch."""
        self.raised: list[BaseException] = []
        self.ended_by_the_program = False
        """It ended by an exception that a function under test raised."""

    def is_of_the_program(self, error: BaseException) -> bool:
        """Whether an exception that ended the test came from a function under test."""
        return error in self.raised

    def count(self) -> None:
        """Counts a call with unknown outcome, and ends a test that makes too many."""
        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise _Stop

    def stand_in(self, name: str) -> Any:
        """Returns the stand-in of a function."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(value, _Any) for value in (*args, *kwargs.values())):
                self.is_open = True
                self.count()  # a loop may wait for what is not known
                return _Any(holds=True)
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
                return _Any(holds=True)
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


class _Table(dict[Any, Any]):
    """A dictionary of a wrong program, which has a value for each key that a test may ask for."""

    def __missing__(self, key: object) -> float:
        return -0.5


_VALUES: dict[str, Callable[[int], Any]] = {
    "negative": lambda number: -number - 0.125,
    "number": lambda number: 7919 + 2 * number,
    "text": lambda number: f"<{number}>",
    "list": lambda number: [7919 + number + each for each in range(7)],
    "twice": lambda number: [7919 + number, 7919 + number],
    "table": lambda number: _Table({7919 + number: number}),
    "none": lambda number: None,
}
"""What a program returns that is wrong in all, by a number that is the call's own: equal calls return the same."""
_PLAIN = (*_VALUES, "argument", "nan", "equal", "raises")
"""How a program may be wrong in all: by such values, by what it was given, by what equals everything; or it raises."""
_STRANGE = ("high", "low")
"""It returns what has each attribute (`_Own`), where nothing plain does what the test asks of it."""


class _WithoutProgram(_Test):
    """A test while it runs with functions that are all wrong in one way."""

    def __init__(self, way: str, is_raising: bool) -> None:
        """`is_raising` says whether the test itself raises what it likes to say that it fails."""
        super().__init__({}, {})
        self._way = way
        self._is_raising = is_raising
        self._equal = _Equal(holds=True)
        self._returned_by: dict[tuple[str, str, str], Any] = {}

    def is_of_the_program(self, error: BaseException) -> bool:
        """Also what cannot be done with a value of this kind, which the test does not assert."""
        is_said = isinstance(error, AssertionError) or not isinstance(error, Exception) or self._is_raising
        return super().is_of_the_program(error) or not (is_said or self._way in _STRANGE)

    def stand_in(self, name: str) -> Any:
        """Returns the stand-in of a function."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.count()
            if self._way == "raises":
                self.raised.append(CandidateError("any"))
                raise self.raised[-1]
            call = (name, repr(args), repr(kwargs))
            for value in args if self._way in ("negative", *_STRANGE) else ():
                if isinstance(value, list | dict | set):
                    value.clear()
            if self._way == "argument":
                return args[0] if args else None
            if call not in self._returned_by:
                self._returned_by[call] = self._value(call)
            return self._returned_by[call]

        called.__name__ = name
        return called

    def _value(self, call: tuple[str, str, str]) -> Any:
        if self._way in _VALUES:
            return _VALUES[self._way](len(self._returned_by))
        if self._way == "nan":
            return math.nan
        return self._equal if self._way == "equal" else _Own(call, self._way == "high")


def same(found: Any, expected: Any) -> bool:
    """Compares with data of JSON, where a tuple is a list and a key is text. Integers are compared exactly, NaN equals itself."""
    if isinstance(found, tuple):
        found = list(found)
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = {_key(key): key for key in found}
        is_json = len(keys) == len(found) and keys.keys() == expected.keys()
        return is_json and all(same(found[keys[key]], expected[key]) for key in expected)
    numbers = (int, float)
    if isinstance(expected, numbers) and isinstance(found, numbers):
        return isinstance(expected, bool) == isinstance(found, bool) and _same_number(found, expected)
    if isinstance(found, _Any):
        return bool(found)
    return type(found) is type(expected) and bool(found == expected)


def _key(key: Any) -> Any:
    """Returns a dictionary's key as JSON has it, or what no key of JSON equals."""
    if isinstance(key, str):
        return key
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else (key,)


def _same_number(found: float, expected: float) -> bool:
    if found == expected or (found != found and expected != expected):
        return True
    if not (isinstance(found, float) and isinstance(expected, float)):
        return False
    if found.is_integer() and expected.is_integer() and abs(found) < _EXACT_INTEGERS:
        return False
    return math.isclose(found, expected, rel_tol=1e-9)


def _called_names(*sources: str) -> set[str]:
    """Returns the names that sources call, or pass to what is called there, and that nothing there defines."""
    called: set[str] = set()
    passed: list[tuple[ast.Call, str]] = []
    defined = set(dir(builtins))
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name):
                    called.add(node.func.id)
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
                passed += [(node, value.id) for value in values if isinstance(value, ast.Name)]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).partition(".")[0])
    called -= defined
    passed = [(call, name) for call, name in passed if not (isinstance(call.func, ast.Name) and call.func.id in called)]
    return (called | {name for _, name in passed} - defined) - {"same", "data"}


def _run(test: _Test, source: str, setup: str, entry_point: str | None, cpu_seconds: float) -> str:
    """Returns `passed`, `failed`, `open`, or `fault: ` and what is wrong with the test itself."""
    namespace: dict[str, Any] = {"__name__": "tests", "same": same, "data": _data}
    try:
        names = _called_names(setup, source) | ({entry_point} if entry_point else set())
        programs = [compile(text, "tests", "exec") for text in (setup, source)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # whatever a text of no Python raises
        return f"fault: {error}"
    random.setstate(_RANDOM)  # noqa: TID251 - tests draw from it, and nothing else of this process does
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        namespace.update({name: test.stand_in(name) for name in names})
        for program in programs:
            exec(program, namespace)
        if entry_point and callable(namespace.get("check")):
            namespace["check"](namespace[entry_point])
    except BaseException as error:  # noqa: BLE001 - a test fails by raising whatever it likes
        test.ended_by_the_program = test.is_of_the_program(error)
        if isinstance(error, SystemExit) and not error.code and not test.is_open:  # as a script says that all is well
            return "failed" if test.has_failed else "passed"
        if test.is_open:
            return "open"
        if isinstance(error, NameError | ImportError | TypeError) and error not in test.raised and not test.has_failed:
            is_ours = not isinstance(error, TypeError) or "no plain data" in str(error)
            return f"fault: {type(error).__name__}: {error}"[:300] if is_ours else "failed"
        return "failed"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "open" if test.is_open else "failed" if test.has_failed else "passed"


def _fault(source: str, setup: str, entry_point: str | None, cpu_seconds: float) -> str:
    """Returns why a test checks nothing, whatever the program is; empty if some program fails it.

    It is run with functions that are wrong, whose values are plain: a value beside itself, and what holds of any number, passes
    with all of them. What cannot be done with a value is no failure, unless it can be done with none.
    """
    nodes = [node for text in (setup, source) for node in ast.walk(ast.parse(text))]
    is_raising = any(isinstance(node, ast.Raise) for node in nodes)
    has_passed = False
    for way in (*_PLAIN, *_STRANGE):
        if (way == "nan" and not re.search("nan|finite", source)) or (way in _STRANGE and has_passed):
            continue
        test = _WithoutProgram(way, is_raising)
        outcome = _run(test, source, setup, entry_point, min(cpu_seconds, _PROOF_SECONDS))
        if not test.calls:
            return f"it calls no function of the program{_remedy(source)}: {source[:100]!r}"
        if not any(map(_is_assertion, nodes)):
            return f"it asserts nothing: {source[:100]!r}"
        if outcome != "passed" and not test.ended_by_the_program:
            return ""
        has_passed |= outcome == "passed" and way in _VALUES
    return f"it passes whatever the program returns: {source[:100]!r}"


def _is_assertion(node: ast.AST) -> bool:
    """Whether a statement can fail a test by itself: `assert`, `raise`, or a method as `assertEqual` and `fail` of unittest."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return isinstance(node, ast.Assert | ast.Raise) or "assert" in name.lower() or name in ("fail", "exit", "_exit")


def _remedy(source: str) -> str:
    """Returns what may be meant by a source that calls nothing of the program, to be put behind that."""
    statements = ast.parse(source).body
    value = statements[0].value if len(statements) == 1 and isinstance(statements[0], ast.Expr) else None
    if isinstance(value, ast.List | ast.Tuple | ast.Dict):
        return " (it is a list as text; expected a list, or the source alone)"
    defined = [each.name for each in statements if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    if "check" in defined:
        return " (for check(candidate), entry_point or entry_point_column has to name a function that the tests do not define)"
    return f" (nothing there runs {', '.join(defined)})"[:200] if defined else ""


def _data(text: str) -> Any:
    """Returns plain data that a test has as text."""
    return decode(json.loads(text))


def _expire(number: int, frame: object) -> None:
    raise _Stop


def main() -> None:
    """Reads the tests and the outcomes known so far; prints the tests' outcomes and the calls to be made."""
    request = json.loads(sys.stdin.buffer.read())
    output, sys.stdout = sys.stdout, sys.stderr
    signal.signal(signal.SIGPROF, _expire)
    known = dict(request["known"])
    noted: dict[str, Any] = {}
    setup, entry_point, cpu_seconds = request["setup"], request["entry_point"], request["cpu_seconds"]
    outcomes = []
    for source in request["tests"]:
        outcome = _run(_Test(known, noted), source, setup, entry_point, cpu_seconds)
        if request["proves"] and not outcome.startswith("fault"):
            fault = _fault(source, setup, entry_point, cpu_seconds)
            outcome = f"fault: {fault}" if fault else outcome
        outcomes.append(outcome)
    output.write(json.dumps({"outcomes": outcomes, "noted": list(noted.items())}))
    output.flush()


if __name__ == "__main__":
    main()
