"""The words that `docs/glossary.md` retires are used nowhere: one concept has one word."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
GLOSSARY = REPOSITORY / "docs" / "glossary.md"

NO_PRODUCT = {".venv", ".git", "build", "dist", "outputs", ".hypothesis"}
"""Folders whose files are not ours, or are made."""


@cache
def texts() -> dict[Path, str]:
    """What our files say, each read once."""
    ours = [each for each in REPOSITORY.iterdir() if each.name not in NO_PRODUCT]
    paths = [path for each in ours for path in ([each] if each.is_file() else each.rglob("*"))]
    return {
        path: path.read_text()
        for path in sorted(paths)
        if path.suffix in (".py", ".md", ".toml")
        and not NO_PRODUCT & {*path.relative_to(REPOSITORY).parts}
        and path not in (GLOSSARY, Path(__file__))
    }


def retired_words() -> dict[str, str]:
    """The table's rows: what to write for each retired word."""
    section = GLOSSARY.read_text().partition("\n## Retired words\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return dict(rows[2:])


def pattern_of(word: str) -> re.Pattern[str]:
    """Matches a word that is whole or between underscores: in any letter case if it is in small letters, else exactly."""
    plain = word.isalpha() and word.islower()
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", re.IGNORECASE if plain else 0)


RETIRED = retired_words()


def uses(text: str, word: str) -> list[int]:
    """The numbers of the lines that use a word."""
    pattern = pattern_of(word)
    if word.casefold() not in text.casefold():  # found in less time than the pattern
        return []
    return [number for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_used_nowhere(word: str) -> None:
    found = [f"{path.relative_to(REPOSITORY)}:{line}" for path, text in texts().items() for line in uses(text, word)]
    assert not found, f"write {RETIRED[word]!r} instead of {word!r}"


@pytest.mark.parametrize(
    ("text", "word", "used"),
    [
        ("Judge it", "judge", True),
        ("def _judge_group():", "judge", True),
        ("a judgement", "judge", False),
        ("prejudge", "judge", False),
        ("Taking a step", "Taking", True),
        ("taking a step", "Taking", False),
        ("self.last_words = 1", "last_words", True),
        ("read losses.json", "losses.json", True),
        ("losses_json", "losses.json", False),
    ],
)
def test_words_are_compared_whole(text: str, word: str, used: bool) -> None:
    assert bool(uses(text, word)) == used
