"""Finding the program in a completion, and values that cross between sandboxes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.environments.rewards.code.assertions import same
from counterpoint.environments.rewards.code.blocks import code_of
from counterpoint.environments.rewards.code.plain_data import Opaque, decode, encode

DOCUMENTED = 'def f():\n    """Doc.\n\n    ```python\n    f()\n    ```\n    """'
ANSWERS = [
    ("x = 1", "x = 1"),
    ("", None),
    (" \n", None),
    ("```python\nx = 1\n```", "x = 1"),
    ("First:\n```\na\n```\nBetter:\n```py\nb\nc\n```\nEnd", "b\nc"),
    ("```python\nx = '''```'''\n```", "x = '''```'''"),
    ("```bash\nls\n```", None),
    ("```python\na\n```\n```text\nout\n```", "a"),
    ("```python\nx = 1", "x = 1"),
    ("```python\n```", None),
    ("````python\nx = 1\n````", "x = 1"),
    ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''"),
    ("~~~python\nx = 1\n~~~", "x = 1"),
    ('```python title="solution.py"\nx = 1\n```', "x = 1"),
    ("```python {linenos=true}\nx = 1\n```", "x = 1"),
    ("```{python}\nx = 1\n```", "x = 1"),
    ("```{r}\nx = 1\n```", None),
    ("``` python\nx = 1\n```", "x = 1"),
    ("```Python3\nx = 1\n`````", "x = 1"),
    ('```bash title="python"\nls\n```', None),
    ("I use ```x``` here.", "I use ```x``` here."),
    ("```print(1)```", "```print(1)```"),
    # A block with a language goes before one without; of equals the last counts.
    ("```python\na\n```\nIt prints:\n```\n3\n```", "a"),
    ("```\n1 2\n```\n```python\na\n```\n```\n3\n```\n```text\n4\n```", "a"),
    ("```python\na\n```\nNo:\n```python\nb\n```\n```\n3\n```", "b"),
    ("```\na\n```\n```\nb\n```\n```bash\npython b.py\n```", "b"),
    ("```text\n3\n```\n```\na\n```", "a"),
    ("```c++\na\n```\n```java\nb\n```", None),
    ("```python\na\n```\n```python\n\n```", "a"),
    ("```python\na\n```\n```\n3", "a"),
    ("```python\na\n```\n```python\nb", "b"),
    # A fence that ends what the prompt began.
    ("def f(x):\n    return x\n```", "def f(x):\n    return x"),
    ("# f\n\nimport sys\nprint(1)\n```\nThis works since x = 2.", "# f\n\nimport sys\nprint(1)"),
    ("n = int(input())\nprint(n)\n```\n\nDone", "n = int(input())\nprint(n)"),
    ("for i in range(3):\n    print(i)\n````", "for i in range(3):\n    print(i)"),
    ("\n" * 50_000 + "x", "\n" * 50_000 + "x"),
    ("\n" * 50_000 + "```\nx", "x"),
    ("Here is the code, f(x):\n```\nx = 1", "x = 1"),
    ("# Solution\n```\nx = 1", "x = 1"),
    ('"""Doc."""\ndef f(): pass\n```', '"""Doc."""\ndef f(): pass'),
    ("import this\n```", "import this"),
    ("@cache\ndef f(a,\n b): pass\n```", "@cache\ndef f(a,\n b): pass"),
    ("for each of them:\n```\nx = 1", "x = 1"),
    ("from the problem we see:\n```\nx = 1", "x = 1"),
    ("Solution = the program below\n```\nx = 1", "x = 1"),
    ("Solution (in Python)\n```\nx = 1", "x = 1"),
    ("Solution\n```\nx = 1", "x = 1"),
    (f"{'(' * 50_000}\n```\nx = 1", "x = 1"),
    (f"{'-' * 900}x\n```\nx = 1", f"{'-' * 900}x"),
    ("x = 1\n```\nBetter:\n```python\nx = 2\n```", "x = 2"),
    ("    return x\n```", "    return x"),
    ("return x + 1\n```\nDone", "return x + 1"),
    ("    if x:\n        return 1\n    return 2\n```", "    if x:\n        return 1\n    return 2"),
    ("    yield x[0]\n```", "    yield x[0]"),
    ("return the program below\n```\nx = 1", "x = 1"),
    # Reasoning.
    ("<think>\n```python\na\n```", None),
    ("[THINK]```python\na\n```[/THINK]```python\nb\n```", "b"),
    ("x = '<think>'", "x = '<think>'"),
    # Languages.
    ("```python3.11\na\n```\n```\n3\n```", "a"),
    ("```PY\na\n```\n```\n3\n```", "a"),
    ("```pypy3\na\n```\n```\n3\n```", "a"),
    ("```{.python .numberLines}\na\n```\n```\n3\n```", "a"),
    ("```python:solution.py\na\n```\n```\n3\n```", "a"),
    ("```pycon\n>>> a\n```\n```\nb\n```", "b"),
    # Where fences stand.
    ("1. So:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1"),
    ("- ```python\n  def f():\n      return 1\n  ```", "def f():\n    return 1"),
    ("> ```python\n> def f():\n>     return 1\n> ```", "def f():\n    return 1"),
    ("Here: ```python\na\n```\nIt prints\n```\n3\n```", "a"),
    ("<answer>```python\na\n```</answer>", "a"),
    ("```python\nprint(1)```\n```\n3\n```", "print(1)"),
    ("```python\na\n``` That is it.\n```\n3\n```", "a"),
    ("```python\ndef f():\n    return 1\n    ```\nDone.", "def f():\n    return 1"),
    (f"```python\n{DOCUMENTED}\n```", DOCUMENTED),
    ("```python\r\na\r\nb\r\n```\r\n", "a\r\nb\r"),
    ("```python\nx = '\u2028\x0c'\n```", "x = '\u2028\x0c'"),
    ("~~~\na\n```\n~~~", "a\n```"),
    # Drafts.
    ("```python\ndraft\nNo.\n```python\na\n```", "a"),
    ("<think>\n```python\ndraft\n```\n</think>\n```\na\n```", "a"),
    ("<think>```python\ndraft\n</think>\n```python\na\n```", "a"),
    ("<think>draft</think>\n\na = 1", "\n\na = 1"),
    ("```python\nprint('</think>')\n```", "print('</think>')"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "code"), ANSWERS)
def test_the_last_block_of_python_is_the_program(completion: str, code: str | None) -> None:
    assert code_of(completion) == code


@pytest.mark.parametrize(
    "line", ["`" * 300_000, "~" * 300_000 + "`", "> " * 150_000, "    ```\n" * 9_000, "</think>" * 9_000]
)
def test_each_line_of_a_completion_is_read_once(line: str) -> None:
    """A square of its size would take minutes."""
    assert code_of(f"{line}\n```python\nb\n```") != line


LEAVES = [
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.binary(max_size=4),
    st.complex_numbers(allow_nan=False, allow_infinity=False),
    st.sets(st.integers(), max_size=3),
    st.frozensets(st.integers(), max_size=3),
]


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=2) | st.integers()
    return st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(keys, inner, max_size=3)


PLAIN = st.recursive(st.one_of(LEAVES), nested, max_leaves=8)


@settings(max_examples=150)
@given(PLAIN)
def test_plain_data_crosses_exactly(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert repr(found) == repr(value) or found == value
    assert type(found) is type(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("oifcbdtsz"), inner, max_size=2),
    max_leaves=10,
)


@settings(max_examples=300)
@given(JSON)
def test_foreign_data_never_raises(data: Any) -> None:
    decode(data)


def test_what_is_no_plain_data_equals_nothing() -> None:
    found = decode(encode(object()))
    assert isinstance(found, Opaque)
    assert found != found
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert "deeper" in json.dumps(encode(deep))
    assert isinstance(decode(deep), Opaque)
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize(
    ("found", "expected", "equal"),
    [
        ((1, 2), [1, 2], True),
        ({1: "a"}, {"1": "a"}, True),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (1, True, False),
        ([1], [1, 2], False),
        ("1", 1, False),
        (Opaque("x"), None, False),
        (None, None, True),
        (math.nan, 1.0, False),
        (math.nan, math.nan, True),
        (math.inf, 1.0, False),
        (math.inf, 5, False),
        (1.0, math.inf, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (1000000005, 1000000006, False),
        (1000000005.0, 1000000006, False),
        (1000000005, 1000000006.0, False),
        (1000000005.0, 1000000006.0, False),
        (2**53 + 1, 2**53, False),
        (2**53 + 1, float(2**53), False),
        (10**400, 1.5, False),
        (2.9999999999, 3, False),
        (2.9999999999999996, 3.0, True),
        (1e300, math.nextafter(1e300, math.inf), True),
        (True, 1, False),
        (True, 1.0, False),
        (0.5 + 1e-8, 0.5, False),
        ({1: "b", "1": "a"}, {"1": "a"}, False),
        ({True: 1, None: 2, 1.5: 3}, {"true": 1, "null": 2, "1.5": 3}, True),
        ({(1,): 1}, {"(1,)": 1}, False),
        ({1, 2}, [1, 2], False),
    ],
)
def test_values_are_compared_with_those_of_json(found: Any, expected: Any, equal: bool) -> None:
    assert same(found, expected) == equal
