"""The table of the five documents, `README.md` here: each row has a place, and names a test that exists."""

from __future__ import annotations

import re

from tests.test_docs import REPOSITORY, names_in

PAGE = REPOSITORY / "tests" / "conformance" / "README.md"

TEST = re.compile(r"(?:`(tests/[\w/]+\.py)`:)?`(test_\w+)`")

PLACE = re.compile(r"`(?!tests/)[\w/]+\.\w+`.*; ")
"""A file of the product, before the tests."""


def rows() -> list[list[str]]:
    """The cells of each row of the page's tables, without heads and lines."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if row[0] != "name or rule" and set(row[0]) != {"-"}]


def test_every_row_is_complete() -> None:
    """A difference may be missing; then the row has an empty third cell."""
    assert len(rows()) > 100
    assert [row for row in rows() if len(row) != 3 or not all(row[:2]) or not PLACE.search(row[1])] == []


def test_every_row_names_a_test_that_exists() -> None:
    known = {name for path in PAGE.parent.glob("test_*.py") for name in names_in(path)}
    wrong = {
        row[0]: name
        for row in rows()
        for file, name in TEST.findall(row[1]) or [("", "no test")]
        if name not in (names_in(REPOSITORY / file) if file else known)
    }
    assert wrong == {}
