"""Exit codes, in words."""

from __future__ import annotations

import pytest

from counterpoint.cluster.exit_codes import describe_exit


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with exit code 3"),
        (74, "ended with exit code 74: the disk is full"),
        (137, "was killed by SIGKILL"),
        (143, "was stopped by SIGTERM"),
        (255, "ended with exit code 255"),
    ],
)
def test_exits_are_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
