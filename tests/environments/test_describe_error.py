"""What is said of an exception of an environment: its text in full, and the place in the author's code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.describe_error import describe_error
from counterpoint.transport.printable import shortened


def raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as found:  # noqa: PT011 - anything
        call()
    return found.value


def theirs(tmp_path: Path, body: str, **more: Any) -> Callable[[], Any]:
    """A function of an author's module."""
    file = tmp_path / "theirs.py"
    names: dict[str, Any] = {"__name__": "theirs", "json": json, "shortened": shortened} | more
    exec(compile(f"def score():\n    {body}\n", str(file), "exec"), names)
    score: Callable[[], Any] = names["score"]
    return score


def test_the_place_is_in_the_authors_code(tmp_path: Path) -> None:
    place = f"(in score, {tmp_path}/theirs.py:2"
    assert describe_error(raised(theirs(tmp_path, "{}['x']"))) == f"KeyError: 'x' {place})"
    of_library = describe_error(raised(theirs(tmp_path, "json.loads('{')")))
    assert f"{place}, in raw_decode, " in of_library
    of_us = describe_error(raised(theirs(tmp_path, "shortened(None, 3)")))
    assert f"{place}, in shortened, " in of_us
    assert "transport/printable.py:" in of_us


def test_our_package_is_not_taken_for_the_authors_code(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "counterpoint.some.module"}
    exec(compile("def fails(): {}['x']", "/ours.py", "exec"), names)
    said = describe_error(raised(theirs(tmp_path, "fails()", fails=names["fails"])))
    assert said.endswith(f"(in score, {tmp_path}/theirs.py:2, in fails, /ours.py:1)")


def test_a_long_text_is_cut_between_words_and_keeps_its_end_and_place(tmp_path: Path) -> None:
    said = describe_error(raised(theirs(tmp_path, "raise ValueError('word ' * 1000 + 'the reason')")))
    assert said.startswith("ValueError: word word")
    assert "word word… word" in said
    assert said.endswith(f"word the reason (in score, {tmp_path}/theirs.py:2)")
    assert "\udcff" not in describe_error(raised(theirs(tmp_path, "raise ValueError(chr(0xdcff))")))


def test_a_shortened_text_ends_with_an_ellipsis() -> None:
    assert shortened("one two three", 13) == "one two three"
    assert shortened("one two three", 12) == "one two…"
    assert shortened("a " + "x" * 20, 12) == "a xxxxxxxxx…"
