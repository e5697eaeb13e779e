"""What a user is told of a failure in one line, and of a metric that a result lacks."""

from __future__ import annotations

import pytest

from counterpoint.tune.errors import in_one_line
from counterpoint.tune.result import what_it_has

RAISED = """Traceback (most recent call last):
  File "train.py", line 3, in training
    raise ValueError("bad shape:\\n  4")
"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (None, ""),
        ("killed by SIGSEGV\n\nwhere it was:\n  File a\nExtension modules: b", "killed by SIGSEGV"),
        (RAISED + "ValueError: bad shape:\n  4\n", "ValueError: bad shape:"),
        (RAISED + "KeyError: 'a'\n\nDuring handling:\n\n" + RAISED + "ValueError: the last\n", "ValueError: the last"),
        ("Traceback (most recent call last):\n", "Traceback (most recent call last):"),
    ],
)
def test_the_line_that_says_most_is_shown(message: str | None, line: str) -> None:
    assert in_one_line(message) == line


def test_a_missing_metric_is_told_with_the_nearest_and_what_was_reported() -> None:
    result = {"loss": 1.0, "eval": {"reward": 2}, "training_iteration": 1, "pid": 7, "config": {"lr": 1}, "done": False}
    assert what_it_has(result, "los") == "the nearest is 'loss'; it has eval/reward, loss"
    assert what_it_has(result, "training_iterations").startswith("the nearest is 'training_iteration'; it has eval/")
    assert what_it_has({"pid": 7}, "loss") == "it has no metric of its own"
