"""`transport.typed`: what fits its declaration becomes one, and what does not is named with its place, value and type."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from counterpoint.transport import typed as typed_module
from counterpoint.transport.typed import met, typed
from tests.support.polling import DEADLINE_SECONDS


class Colour(StrEnum):
    RED = "red"


@dataclass
class Part:
    count: Annotated[int, Meta(ge=0, le=9)]
    weights: tuple[float, ...] = ()
    colour: Colour = Colour.RED
    by_name: dict[str, list[int]] | None = None


class Head(msgspec.Struct, array_like=True):
    kind: Literal["put"]
    sizes: tuple[int, ...]


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    count: int = 0


def test_a_value_becomes_what_is_declared() -> None:
    found = typed(
        [{"count": 3, "weights": [1, 2.5], "colour": "red", "more": 1}], tuple[Part, ...], "parts", ValueError
    )
    assert found == (Part(3, (1.0, 2.5), Colour.RED),)
    assert type(found[0].weights[0]) is float


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"count": "3"}, r"^parts\[0\]\.count is '3'; expected int"),
        ({"count": True}, r"^parts\[0\]\.count is True; expected int"),
        ({"count": 3.0}, r"^parts\[0\]\.count is 3\.0; expected int"),
        ({"count": -1}, r"^parts\[0\]\.count is -1; expected int >= 0"),
        ({"count": 10**30}, r"^parts\[0\]\.count is 10{30}; expected int <= 9"),
        ({"count": -(10**5000)}, r"^parts\[0\]\.count is an integer of 16610 bits; expected int >= 0"),
        ({"count": 1, "weights": [1.0, None]}, r"^parts\[0\]\.weights\[1\] is None; expected float"),
        ({"count": 1, "colour": "x" * 500}, r"^parts\[0\]\.colour is 'x+\.\.\.x+'; invalid enum value"),
        ({"count": 1, "by_name": {"a": [1, "b"]}}, r"^parts\[0\]\.by_name is .*'b'.*; expected int"),
        ({"count": 1, "by_name": {7: []}}, r"^parts\[0\]\.by_name is \{7: \[\]\}; expected str as keys"),
        ({}, r"^parts\[0\] is \{\}; object missing required field count"),
        ([], r"^parts\[0\] is \[\]; expected object"),
    ],
)
def test_what_does_not_fit_is_named(part: Any, message: str) -> None:
    with pytest.raises(_Faulty, match=message):
        typed([part], list[Part], "parts", _Faulty)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (["put", [1, "x"]], Head, r"^it\.sizes\[1\] is 'x'; expected int$"),
        (["got", []], Head, r"^it\.kind is 'got'; invalid enum value 'got'$"),
        ([" - at `$[9]`", []], Head, r"^it\.kind is ' - at `\$\[9\]`'; invalid enum value"),
        ({" - at `$.key": 1}, Closed, r"^it is \{' - at `\$\.key': 1\}; object contains unknown field"),
        ([f" - at `$[{'9' * 5000}]`", []], Head, r"^it\.kind is "),
        ({" - at `$[" + "9" * 5000 + "]": 1}, Closed, r"^it is \{"),
        (["\n\x1b[1m", []], Head, r"^it\.kind is '\\n\\x1b\[1m'; invalid enum value '[^\n\x1b]*$"),
        (["x" * 10**6, []], Head, r"^it\.kind is '.{,200}$"),
        ({"x" * 10**6: 1}, Closed, r"^it is \{.{,200}$"),
    ],
)
def test_what_was_found_cannot_mislead(value: Any, kind: type, message: str) -> None:
    """Msgspec quotes what it has found, in which a peer may have written anything."""
    with pytest.raises(_Faulty, match=message):
        typed(value, kind, "it", _Faulty)


class _Faulty(ValueError):
    pass


RACE = """
import sys, threading
from msgspec import defstruct
from counterpoint.transport.typed import typed

sys.setswitchinterval(1e-6)
for number in range(200):
    inner = defstruct(f"Inner{number}", [(f"field{place}", int) for place in range(8)], array_like=True)
    outer = defstruct(f"Outer{number}", [("one", inner), ("more", list[inner])], array_like=True)
    value = [[1] * 8, [[1] * 8]]
    barrier = threading.Barrier(4)

    def work():
        barrier.wait()
        typed(value, outer, "it", ValueError)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.slow
def test_a_type_that_several_threads_meet_first_crashes_nothing() -> None:
    assert subprocess.run([sys.executable, "-c", RACE], timeout=DEADLINE_SECONDS, check=False).returncode == 0


def test_one_thread_at_a_time_has_msgspec_meet_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    class New(msgspec.Struct):
        count: int

    seen = []
    decoder = msgspec.msgpack.Decoder

    def noted(kind: Any) -> msgspec.msgpack.Decoder[Any]:
        seen.append(typed_module._meeting.locked())
        return decoder(kind)

    monkeypatch.setattr(msgspec.msgpack, "Decoder", noted)
    assert met(New) is New
    assert met(New) is New
    assert seen == [True]  # the second time needs no lock
    assert met(list[New] | None) == list[New] | None


CHECKER = Path(__file__).parents[2] / "counterpoint" / "verify"
WITHOUT_STRUCTS = ("dict[str, msgspec.Raw]", "list[msgspec.Raw]")
"""Types that several threads may meet first at once."""


def test_no_type_reaches_msgspec_unmet() -> None:
    """What decodes or converts by itself passes its type through `met`.

    Not the checker of receipts: it imports nothing of the product, and runs in one thread.
    """
    root = Path(__file__).parents[2]
    found = []
    for path in sorted(
        each for top in ("counterpoint", "orchestrator", "transport") for each in (root / top).rglob("*.py")
    ):
        if (
            "msgspec" not in (text := path.read_text())
            or path == root / "transport" / "typed.py"
            or CHECKER in path.parents
        ):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (kind := _kind_of(node)) is not None:
                is_met = ast.unparse(kind).startswith("met(") or ast.unparse(kind) in WITHOUT_STRUCTS
                found += [] if is_met else [f"{path.relative_to(root)}:{node.lineno}"]
    assert not found, f"pass the type through `counterpoint.transport.typed.met`: {found}"


def _kind_of(call: ast.Call) -> ast.expr | None:
    """The type that a call of msgspec's is given: as `type`, or at its place among the others."""
    module, _, name = ast.unparse(call.func).rpartition(".")
    if module not in ("msgspec", "msgspec.json", "msgspec.msgpack", "json", "msgpack"):
        return None
    places = {"convert": call.args[1:], "Decoder": call.args, "decode": []}
    if name not in places:
        return None
    return next((each.value for each in call.keywords if each.arg == "type"), next(iter(places[name]), None))
