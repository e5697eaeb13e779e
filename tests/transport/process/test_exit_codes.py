"""Which words about an end have its reason."""

from __future__ import annotations

import pytest

from counterpoint.transport.process.exit_codes import is_explained


@pytest.mark.parametrize(
    ("death", "explained"),
    [
        ("ended with exit code 1", False),
        ("ended with exit code 1: the port is in use", True),
        ("ended with exit code 2: `start` called sys.exit(2)", False),
        ("ended with exit code 2: `start` called sys.exit(2): no memory", True),
        ("ended with exit code 1: `start` raised RanksFailed: rank 0 ended with exit code 1", False),
        ("ended with exit code 1: `start` raised RanksFailed: rank 1 was ended by SIGSEGV", False),
    ],
)
def test_a_death_is_explained_by_more_than_how_it_ended(death: str, explained: bool) -> None:
    assert is_explained(death) is explained
