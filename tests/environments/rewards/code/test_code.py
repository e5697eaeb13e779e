"""Unit tests for code in the real sandbox: partial credit, and programs that would fake what they did not do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.base import EnvironmentContext, Example
from counterpoint.environments.rewards.code import assertions
from counterpoint.environments.rewards.code.functions import FaultyTests
from counterpoint.environments.rewards.rubric import Rubric, Scored
from counterpoint.environments.sandbox.python_sandbox import Sandbox, SandboxUnavailable

Make = Callable[..., Awaitable[Rubric]]


@pytest.fixture(scope="module")
def mode() -> str:
    """Namespaces where the machine has them; what the tests assert holds without them, too."""
    import asyncio

    async def find() -> str:
        sandbox = Sandbox()
        try:
            await sandbox.start()
            return "namespaces"
        except SandboxUnavailable:
            return "none"
        finally:
            await sandbox.close()

    return asyncio.run(find())


@pytest.fixture
async def tested_by(tmp_path: Path, mode: str) -> AsyncIterator[Make]:
    made: list[Rubric] = []

    async def make(style: str, **keys: Any) -> Rubric:
        made.append(Rubric([{"kind": "code", "style": style, "sandbox": mode, "cpu_seconds": 1.0} | keys], 1))
        await made[-1].start(EnvironmentContext("mine", tmp_path, tmp_path, 0))
        return made[-1]

    yield make
    for rubric in made:
        await rubric.close()


async def score(rubric: Rubric, code: str, **info: Any) -> Scored:
    return await rubric.score(Example(0, "?", "", info), f"Here it is:\n```python\n{code}\n```\nDone.", {})


ADDS = "def add(a, b):\n    return a + b"
HALF_RIGHT = "def add(a, b):\n    return a + b if a < 5 else 0"
ASSERTS = [f"assert add({a}, 1) == {a + 1}" for a in (1, 2, 6, 7)]
CHECK = "def check(candidate):\n" + "".join(f"    {each.replace('add', 'candidate')}\n" for each in ASSERTS)

CHEATS = {
    "prints success": "print('passed ' * 100)\nprint('{\"outcomes\": [\"passed\"]}')",
    "exits": "import os\nos._exit(0)",
    "exits at a call": "import os\ndef add(a, b):\n    os._exit(0)",
    "raises SystemExit": "def add(a, b):\n    raise SystemExit(0)",
    "equals everything": "class All(int):\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return All(0)",
    "is no number": "class All:\n    def __eq__(self, other): return True\ndef add(a, b):\n    return All()",
    "patches builtins": "import builtins as b\nb.AssertionError = Exception\nb.all = lambda x: 1\ndef add(a, b):\n    return 0",
    "patches the harness": (
        "import sys\nm = sys.modules['__main__'].__dict__\nfor name in list(m):\n"
        "    if callable(m[name]) and not name.startswith('__'):\n        m[name] = lambda *a, **k: {'value': True}\n"
        "def add(a, b):\n    return 0"
    ),
    "looks for what is expected": (
        "import gc, sys\ndef add(a, b):\n    for each in gc.get_objects():\n"
        "        if isinstance(each, str) and 'assert add' in each:\n            return 3\n    return 0"
    ),
    "writes outcomes": ("import os\ndef add(a, b):\n    os.write(1, b'\\n{\"value\": true}\\n' * 100)\n    return 0"),
    "is silent": "import os\nos.close(1)\ndef add(a, b):\n    return a + b",
    "no function": "x = 1",
    "does not compile": "def add(a, b)\n    return",
    "crashes": "import ctypes\ndef add(a, b):\n    ctypes.string_at(0)",
    "recurses": "def add(a, b):\n    return add(b, a)",
    "returns itself": "x = []\nx.append(x)\ndef add(a, b):\n    return x",
    "returns gigabytes": "def add(a, b):\n    return 'x' * 10**6",
    "takes memory": "def add(a, b):\n    return bytearray(10**10)",
    "nests deeply": (
        "import os, sys\nframe = sys._getframe()\nwhile frame:\n    mark = frame.f_locals.get('request', {}).get('mark')\n"
        "    if mark:\n        break\n    frame = frame.f_back\n"
        "os.write(1, ('\\n' + mark + '{\"value\": ' + '[' * 900 + ']' * 900 + '}' + '\\n').encode())\n"
        "def add(a, b):\n    return 0"
    ),
    "finds the mark": (
        "import os, sys\nframe = sys._getframe()\nwhile frame:\n    mark = frame.f_locals.get('request', {}).get('mark')\n"
        "    if mark:\n        break\n    frame = frame.f_back\n"
        "for _ in range(9):\n    os.write(1, ('\\n' + mark + '{\"passed\": 1, \"value\": [[[' + '\\n').encode())\n"
        "    os.write(1, ('\\n' + mark + '{\"value\": {\"o\": 1}, \"after\": 3}' + '\\n').encode())\n"
        "def add(a, b):\n    return 0"
    ),
}


@pytest.mark.slow
async def test_credit_is_the_share_of_tests(tested_by: Make) -> None:
    rubric = await tested_by("asserts")
    assert (await score(rubric, ADDS, tests=ASSERTS)).metrics == {
        "total": 1.0, "code": 1.0, "code/found": 1.0, "code/passed": 4.0,
    }  # fmt: skip
    assert (await score(rubric, HALF_RIGHT, tests=ASSERTS)).reward == 0.5
    assert (await score(await tested_by("asserts", all_or_nothing=True), HALF_RIGHT, tests=ASSERTS)).reward == 0.0
    assert (await score(await tested_by("asserts", max_tests=2), HALF_RIGHT, tests=ASSERTS)).reward == 1.0
    checked = await tested_by("asserts", entry_point_column="name")
    assert (await score(checked, ADDS, tests=CHECK, name="add")).reward == 1.0
    assert (await score(checked, HALF_RIGHT, tests=CHECK, name="add")).reward == 0.0
    called = await tested_by("calls", entry_point="add")
    calls = [{"args": [a, 1], "expected": a + 1} for a in (1, 2, 6, 7)]
    assert (await score(called, HALF_RIGHT, tests=calls)).reward == 0.5
    assert (await rubric.score(Example(0, "?", "", {"tests": ASSERTS}), "```python\n```", {})).metrics[
        "code/found"
    ] == 0.0


@pytest.mark.slow
async def test_no_program_fakes_a_result(tested_by: Make) -> None:
    asserts = await tested_by("asserts")
    for name, code in CHEATS.items():
        assert (await score(asserts, code, tests=ASSERTS)).reward == 0.0, name


@pytest.mark.slow
async def test_no_program_makes_a_test_look_faulty_by_what_it_returns(tested_by: Make) -> None:
    asserts = await tested_by("asserts")
    endless = "def add(a, b):\n    endless = []\n    endless.append(endless)\n    return endless"
    scored = await score(asserts, endless, tests=["assert add(add(1, 2), 3) == 6", "assert add([add(1, 2)], 3) == 6"])
    assert scored.metrics["code/passed"] == 0


@pytest.mark.slow
async def test_no_program_makes_tests_look_faulty_by_where_it_leads_them(tested_by: Make) -> None:
    """A failed rollout would leave its group, where one of value 0 teaches."""
    asserts = await tested_by("asserts")
    endless = "n = 0\nwhile not done(n):\n    n = step(n)\nassert n == 3"
    assert (await score(asserts, "def done(n): return False\ndef step(n): return n + 1", tests=[endless])).reward == 0
    assert (await score(asserts, "def done(n): return n == 3\ndef step(n): return n + 1", tests=[endless])).reward == 1
    many = "for i in range(count()):\n    assert double(i) == 2 * i\nassert count() == 3"
    for count, reward in (("3", 1), ("10**5", 0)):
        code = f"def count(): return {count}\ndef double(n): return 2 * n"
        assert (await score(asserts, code, tests=[many])).reward == reward
    with pytest.raises(FaultyTests, match="deep"):
        await score(
            asserts, "def step(n): return n + 1", tests=["n = 0\nfor _ in range(99):\n    n = step(n)\nassert n"]
        )


@pytest.mark.slow
async def test_no_value_ends_the_process_of_the_tests_as_their_fault(
    tested_by: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power of a large number is computed in C, where no limit within the process stops it."""
    monkeypatch.setattr("counterpoint.environments.rewards.code.functions.wall_seconds", lambda seconds: 2.0)
    asserts = await tested_by("asserts")
    assert (await score(asserts, "def f(n): return 10**9", tests=["assert 3 ** f(2) > 9 and f(2) < 9"])).reward == 0
    with pytest.raises(FaultyTests, match="did not run"):
        await score(asserts, "def f(n): return 2", tests=["assert 3 ** 10**9 > 9 and f(2) == 2"])


@pytest.mark.slow
async def test_no_program_fakes_its_output(tested_by: Make) -> None:
    printed = await tested_by("stdio")
    tests = [{"input": f"{a} 1\n", "output": f"{a + 1}\n"} for a in (1, 2, 6, 7)]
    reads = "a, b = map(int, input().split())\n"
    assert (await score(printed, f"{reads}print(a + b)", tests=tests)).reward == 1.0
    half = f"from __future__ import annotations\n{reads}print(a + b if a < 5 else 0)"
    assert (await score(printed, half, tests=tests)).reward == 0.5
    ends = f"{reads}print(a + b)\nraise SystemExit(1)"
    for code in ("print('passed')", "import os\nos._exit(0)", "1/0", ends, "while True: print(1)"):
        assert (await score(printed, code, tests=tests)).reward == 0.0, code


@pytest.mark.slow
async def test_a_test_finds_nothing_of_an_earlier_one(tested_by: Make) -> None:
    code = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write(input())\nos.chmod('left', 0o777)"
    tests = [{"input": str(each), "output": "[]"} for each in range(3)]
    assert (await score(await tested_by("stdio"), code, tests=tests)).reward == 1.0


@pytest.mark.slow
async def test_a_program_that_hangs_costs_two_limits(tested_by: Make) -> None:
    stdio = await tested_by("stdio", cpu_seconds=0.3)
    tests = [{"input": str(a), "output": str(a)} for a in range(30)]
    assert (await score(stdio, "while True: pass", tests=tests)).reward == 0.0
    asserts = await tested_by("asserts", cpu_seconds=0.3)
    hangs = "def add(a, b):\n    while a > 5: pass\n    return a + b"
    assert (await score(asserts, hangs, tests=ASSERTS)).reward == 0.5
    assert (await score(asserts, "while True: pass", tests=ASSERTS)).reward == 0.0


@pytest.mark.slow
async def test_what_tests_may_do(tested_by: Make) -> None:
    """One function that is right, and tests of many kinds, all of which pass; and of each, one that does not."""
    code = (
        "def sort(x):\n    x.sort()\ndef pair(a):\n    return (a, {a: [a, 1.5, None, True, 'é', b'b', 2**70]}, {a})\n"
        "def fails(kind):\n    raise {'v': ValueError, 'k': KeyError, 'own': type('Own', (Exception,), {})}[kind]('no')\n"
        "def twice(n):\n    return n * 2\ndef up(n):\n    return n + 1\ndef opaque():\n    return (i for i in [])\n"
    )
    right = [
        "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]",
        "assert pair(1) == (1, {1: [1, 1.5, None, True, 'é', b'b', 2**70]}, {1})",
        "assert isinstance(pair(2), tuple) and pair(2)[0] == 2",
        "try:\n    fails('v')\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
        "try:\n    fails('own')\nexcept Exception:\n    pass\nelse:\n    assert False",
        "import math\nassert math.isclose(twice(0.5), 1.0)",
        "assert twice(up(twice(up(1)))) == 10",
        "assert [twice(n) for n in range(5)] == [0, 2, 4, 6, 8]",
        "def helper(n):\n    return twice(n)\nassert helper(3) == 6",
        "n = 1\nwhile twice(n) < 20:\n    n = up(n)\nassert n == 10",
        "assert opaque() != 1",
        "assert limit == 7 and twice(limit) == 14",
    ]
    wrong = [
        "assert pair(1) == [1, {1: [1, 1.5, None, True, 'é', b'b', 2**70]}, {1}]",
        "try:\n    fails('v')\n    assert False\nexcept KeyError:\n    pass",
        "assert opaque() != 1 and opaque() == opaque()",
        "assert twice(opaque()) is None",
        "assert len(sort([1])) == 0",
    ]
    rubric = await tested_by("asserts", setup_column="setup")
    assert (await score(rubric, code, tests=right, setup="limit = 7")).metrics["code/passed"] == len(right)
    assert (await score(rubric, code, tests=wrong, setup="limit = 7")).metrics["code/passed"] == 0


@pytest.mark.slow
async def test_tests_at_fault_fail_the_rollout(tested_by: Make) -> None:
    rubric = await tested_by("asserts", setup_column="setup")
    for tests, message in [
        (["assert add(1, 2) = 3"], "test 0: .*syntax"),
        (["assert add(1, 2) == 3", "assert math.floor(add(1, 2)) == 3"], "test 1: NameError: name 'math'"),
        (["import no_such_module\nadd(1, 2)"], "test 0: ModuleNotFoundError"),
        (["add(1, lambda: 2)"], "no plain data"),
        ([], "column 'tests' is a list, .*; expected a list of tests"),
        (None, "is null"),
    ]:
        with pytest.raises(FaultyTests, match=f"part 'code': .*{message}"):
            await score(rubric, ADDS, tests=tests)
    calls = await tested_by("calls", entry_point="add")
    with pytest.raises(FaultyTests, match="expected a table with args and expected"):
        await score(calls, ADDS, tests=[{"args": [1]}])


REFERENCE = "def add(a, b):\n    return a + b\n"

CHECKS_NOTHING = {
    "the list as JSON text": ('["assert add(1, 2) == 3"]', "a list as text"),
    "the list as text of Python": ("['assert add(1, 2) == 3']", "a list as text"),
    "a list in the list": ([["assert add(1, 2) == 3"]], "test 0 is a list"),
    "a table in the list": ([{"assert": "add(1, 2) == 3"}], "test 0 is a dict"),
    "null in the list": (["assert add(1, 2) == 3", None], "test 1 is null"),
    "an expression": (["add(1, 2) == 3"], "test 0: it asserts nothing"),
    "only a print": (["print(add(1, 2), 3)"], "test 0: it asserts nothing"),
    "check without an entry point": (CHECK, "entry_point"),
    "a comment": (["# assert add(1, 2) == 3"], "test 0: it calls no function"),
    "an empty text": (["assert add(1, 2) == 3", ""], "test 1: it calls no function"),
    "functions for pytest": (["def test_add():\n    assert add(1, 2) == 3"], "test_add"),
    "a class for unittest": (
        ["import unittest\nclass TestAdd(unittest.TestCase):\n    def test(self):\n        assert add(1, 2) == 3"],
        "TestAdd",
    ),
    "its own solution": ([f"{REFERENCE}assert add(1, 2) == 3"], "it calls no function"),
    "only for a main program": (["if __name__ == '__main__':\n    assert add(1, 2) == 3"], "it calls no function"),
    "a pair": (["assert (add(1, 2), 3)"], "it passes whatever"),
    "a text": (["found = add(1, 2)\nassert 'found == 3'"], "it passes whatever"),
    "itself": (["assert add(1, 2) == add(1, 2)"], "it passes whatever"),
    "itself by a name": (["found = add(1, 2)\nwanted = add(1, 2)\nassert found == wanted"], "it passes whatever"),
    "another value": (["found = add(1, 2)\nwanted = 3\nassert wanted == 3"], "it passes whatever"),
    "a failure that is caught": (
        ["try:\n    assert add(1, 2) == 3\nexcept AssertionError:\n    pass"],
        "it passes whatever",
    ),
}
"""Tests that no program fails, each with a part of the reason."""


@pytest.mark.slow
async def test_tests_that_check_nothing_are_at_fault(tested_by: Make) -> None:
    """Whatever the program is: with another outcome for a wrong one, the fault would be a reward."""
    rubric = await tested_by("asserts")
    for name, (tests, message) in CHECKS_NOTHING.items():
        for program in (REFERENCE, "def add(a, b):\n    return 0", "1/0"):
            with pytest.raises(FaultyTests, match=f"example 0.*{message}"):
                print(name, (await score(rubric, program, tests=tests)).metrics)


@pytest.mark.slow
async def test_a_solution_among_the_tests_is_not_taken_for_the_program(tested_by: Make) -> None:
    rubric = await tested_by("asserts", entry_point="add", setup_column="setup")
    for keys in ({"tests": CHECK, "setup": REFERENCE}, {"tests": REFERENCE + CHECK, "setup": None}):
        with pytest.raises(FaultyTests, match="it calls no function"):
            await score(rubric, HALF_RIGHT, **keys)


@pytest.mark.slow
async def test_tests_as_public_data_sets_have_them(tested_by: Make) -> None:
    """Each kind of assertion is one that a wrong program fails, and a right one passes."""
    code = (
        f"{REFERENCE}def known(n):\n    return n in (2, 3, 5)\ndef ends(x):\n    return (x[0], x[-1])\n"
        "def nothing(x):\n    return None\ndef names(x):\n    return {each: len(each) for each in x}\n"
        "def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5\n"
    )
    tests = [
        "assert known(2)",
        "assert not known(4)",
        "assert known(2) == True",
        "assert known(4) is False",
        "assert add(1, 2) != 4",
        "assert nothing([]) is None",
        "assert nothing([1]) == None",
        "assert set(ends([1, 2, 3])) == set((1, 3))",
        "assert sorted(ends([3, 2, 1])) == [1, 3]",
        "assert len(ends([3, 2, 1])) == 2",
        "assert len(names([])) == 0",
        "assert abs(root(2) - 1.4142) < 1e-3",
        "import math\nassert math.isclose(root(2), 1.41421356, rel_tol=1e-6)",
        "assert isinstance(ends([1]), tuple)",
        "assert all(known(n) for n in (2, 3)) and not any(known(n) for n in (4, 6))",
        "assert list(map(known, (2, 4))) == [True, False]",
        "x = [1, 2]\nends(x)\nassert x == [1, 2]",
        "assert 'ab' in names(['ab']) and 'b' not in names(['ab'])",
        "if add(1, 2) != 3:\n    raise ValueError('wrong')",
        "try:\n    root(-1)\n    assert False\nexcept ValueError:\n    pass",
        "try:\n    root(-1)\nexcept Exception as error:\n    assert str(error) == 'negative'",
        "import unittest\nunittest.TestCase().assertEqual(add(1, 2), 3)",
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert True, 'always'\ncheck(add)",
        "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)\n",
        "assert str(add(1, 2)) == '3'",
        "import math\nassert not math.isnan(root(2))",
        "import sys\nsys.exit(0 if add(1, 2) == 3 else 1)",
    ]
    rubric = await tested_by("asserts")
    assert (await score(rubric, code, tests=tests)).metrics["code/passed"] == len(tests)
    wrong = "".join(
        f"def {name}(*args):\n    for each in args:\n        isinstance(each, list) and each.clear()\n"
        f"    return {value}\n"
        for name, value in [
            ("add", 4),
            ("known", "'?'"),
            ("ends", 7),
            ("nothing", 1),
            ("names", "['b']"),
            ("root", "float('nan')"),
        ]
    )
    passed = (await score(rubric, wrong, tests=tests)).metrics["code/passed"]
    assert passed <= 2  # `assert known(2)` holds for a text, and no exception was asked for


@pytest.mark.slow
async def test_tests_of_other_types_are_at_fault(tested_by: Make) -> None:
    """A text is no list of arguments, and what is no text is no input or output."""
    calls = await tested_by("calls", entry_point="add")
    for args in ("12", "[1, 2]", {"a": 1, "b": 2}, 12, None):
        with pytest.raises(FaultyTests, match=r"test 0: args is .*expected a list"):
            await score(calls, ADDS, tests=[{"args": args, "expected": 3}])
    with pytest.raises(FaultyTests, match="every test expects null"):
        await score(calls, ADDS, tests=[{"args": [1, 2], "expected": None}] * 2)
    both = [{"args": [1, 2], "expected": None}, {"args": [1, 3], "expected": 4}]
    assert (await score(calls, ADDS, tests=both)).reward == 0.5
    stdio = await tested_by("stdio")
    for given, expected in [("1", None), ("1", ["3"]), (["1", "2"], "3"), (None, "3"), ("1", True), ("1", 0.5)]:
        with pytest.raises(FaultyTests, match=r"test 0: (in|out)put is .*expected text"):
            await score(stdio, "print(None)", tests=[{"input": given, "output": expected}])
    with pytest.raises(FaultyTests, match="every test expects no output"):
        await score(stdio, "pass", tests=[{"input": "1", "output": ""}, {"input": "2", "output": " \n"}])
    assert (await score(stdio, "print(3)", tests=[{"input": 1, "output": 3}])).reward == 1.0


@pytest.mark.slow
async def test_values_of_json_are_compared_as_they_are(tested_by: Make) -> None:
    calls = await tested_by("calls", entry_point="f")
    infinite, nan = float("inf"), float("nan")
    for returned, expected, equal in [
        ("float('inf')", 3, False),
        ("float('inf')", infinite, True),
        ("float('nan')", nan, True),
        ("float('nan')", 1.0, False),
        ("1000000005", 1000000006, False),
        ("2**53 + 1", 2**53, False),
        ("2**70 + 1", 2**70 + 1, True),
        ("2**70", 2**70 + 1, False),
        ("float(2**70)", 2**70 + 1, False),
        ("10**5000", 10**5000, True),
        ("[1, {'a': (2, 0.1 + 0.2)}]", [1, {"a": [2, 0.3]}], True),
        ("args[0]", {"it's": ["\u00e9", '"', "\n\\"]}, True),
    ]:
        tests = [{"args": [expected], "expected": expected}, {"args": [0], "expected": "?"}]
        code = f"def f(*args):\n    return {returned}"
        assert (await score(calls, code, tests=tests)).metrics["code/passed"] == equal, (returned, expected)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"style": "calls"}, "needs entry_point"),
        ({"style": "calls", "entry_point": "a", "entry_point_column": "b"}, "expected one of them"),
        ({}, r"rubric\[0\]\.style"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rubric([{"kind": "code"} | keys])


OF_ITSELF = [
    "assert f(1) == f(1)", "assert f(1) is f(1)", "x = f([1, 2])\ny = x\nassert x == y", "assert not f(1) != f(1)",
    "assert f(1) == 2 or f(1) == f(1)", "assert f(1) == 2 or f(1) != 2", "assert f(1) in [f(1), 2]", "x = f(1)\nassert x in {x}",
    "assert f(1) <= f(1)", "assert f(1) >= 0 or f(1) < 0", "assert sorted(f([2, 1])) == sorted(f([2, 1]))",
    "assert f(1)[0] == f(1)[0]", "assert all(f(i) == f(i) for i in range(3))", "assert str(f(1)) == str(f(1))",
    "assert [f(1), f(2)] == [f(1), f(2)]", "assert {f(1)} == {f(1)}", "assert max(f(1), f(1)) == f(1)",
    "def equal(a, b): return a == b\nassert equal(f(1), f(1))", "assert (found := f(1)) == found",
    "assert abs(f(1) - f(1)) < 1e-6", "assert f(2) / f(2) == 1", "assert f(1) - f(1) == 0",
    "assert not (f(1) < f(1))", "assert not f(1) > f(1)", "assert f(1) < f(1) + 1", "assert isinstance(f(1), object)",
    "assert len(str(f(1))) >= 0", "assert f(1) or True", "assert abs(f(1)) >= 0", "assert f(1) ** 2 >= 0",
    "assert len(f(1)) >= 0", "assert 0 <= f(1) % 5 < 5", "assert min(f(1), 3) <= 3", "assert bool(f(1)) in (True, False)",
    "assert type(f(1)) is type(f(1))", "assert repr(f(1))", "assert hash(f(1)) == hash(f(1))",
    "import json\nassert json.dumps(f(1)) == json.dumps(f(1))", "assert (f(1) > 0) == (f(1) > 0)",
    "assert f(1)[::-1][::-1] == f(1)", "assert int(f(1)) == int(f(1))", "assert f(1) is None or f(1) is not None",
    "x = f(1)\nassert x * 2 == x + x", "assert set(f(1)) <= set(f(1))", "assert f(1).x == f(1).x",
    "assert hasattr(f(1), '__class__')", "assert f(1) == (f(1) or f(1))",
    "try:\n    assert f(1) == f(1)\nexcept ValueError:\n    raise", "assert callable(f) and str(f(1))",
]  # fmt: skip
OF_THE_PROGRAM = [
    "assert f(1) == 2", "assert f(1) != 5", "assert f(1) is None", "assert f(1) is not None", "assert f(1) not in [1, 2]",
    "assert f(1) == 1 or f(1) == 2", "assert f(1, 2) == f(2, 1)", "assert not f(1)", "assert f(1)", "assert f(1) >= 0",
    "assert isinstance(f(1), int)", "assert abs(f(1) - 0.5) < 1e-6", "assert len(f(1)) == 3",
    "l = [2, 1]\nf(l)\nassert l == [1, 2]",
    "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass", "assert f(f(1)) == f(1)", "assert f(1).x == 2",
    "assert f(1) == f(1) and f(2) == 3", "import math\nassert not math.isnan(f(1))", "assert f('x').startswith('a')",
    "assert f(4) % 2 == 0", "assert 'a' in f('abc')", "assert f(1) == -f(-1)", "assert len(set(f([1, 1]))) == 1",
    "a = [1]\nassert f(a) is not a", "assert f(1) - f(2) == 0", "a = []\nassert f(a) != a",
    "assert not f(1) or f(1)['a'] == 1", "assert f(1)['a'] == 2", "assert f(1) % 3 == 0", "assert f('a').count('b') == 1",
    "assert f(1) is None or f(1) == 3", "assert len(f(1)) == 7", "assert f(1) > f(2)", "assert f(2) > f(1)", "assert f(1) < 10",
    "assert not f(1) < 5", "assert f(1) in range(100)", "assert f(3) != 2 * 3", "import math\nassert math.isfinite(f(1))",
    "assert sorted(f([2, 1])) == [1, 2]", "assert f(1) * 0 == 0", "assert isinstance(f(1), (int, float, complex))",
    "assert len(set(f(5))) == len(f(5))",
    "try:\n    f(1)\nexcept Exception as error:\n    assert 'no' in str(error)", "if f(1) != 2:\n    raise ValueError",
]  # fmt: skip


@pytest.mark.parametrize("test", OF_ITSELF)
def test_a_value_beside_itself_checks_nothing(test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it passes whatever" in fault_of(test, monkeypatch)


@pytest.mark.parametrize("test", OF_THE_PROGRAM)
def test_what_some_program_fails_is_a_test(test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_of(test, monkeypatch) == ""


def fault_of(test: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("signal.setitimer", lambda *_: None)  # of the process that runs tests alone
    return assertions._fault(test, "", None, 1.0)
