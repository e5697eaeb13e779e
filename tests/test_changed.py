"""The tests that `make test-changed` runs are those that use what has changed, and no others but those that look at all files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changed import reached


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "used", "unused"),
    [
        ("transport/frames.py", "tests/transport/test_frames.py", "tests/sweep/test_lease.py"),
        ("tests/sweep/conftest.py", "tests/sweep/test_claim.py", "tests/transport/test_frames.py"),
        ("tests/support/tiny_model.py", "tests/inference/test_vllm_moe.py", "tests/sweep/test_lease.py"),  # a fixture's
        (
            "tests/trainer/sharded_learner.py",
            "tests/trainer/test_sharding.py",
            "tests/trainer/test_loss.py",
        ),  # in a text
        # by the table of commands
        ("counterpoint/cli/logs.py", "tests/cli/test_names_of_users.py", "tests/trainer/test_loss.py"),
        ("counterpoint/inference/plugin/update.py", "tests/inference/test_vllm_moe.py", "tests/trainer/test_loss.py"),
        ("counterpoint/serve/page/app.js", "tests/serve/browser/test_page.py", "tests/trainer/test_loss.py"),
        ("docs/contracts.md", "tests/test_docs.py", "tests/trainer/test_loss.py"),
        ("no/longer.py", "tests/test_imports.py", "tests/trainer/test_loss.py"),
    ],
)
def test_a_change_reaches_the_tests_that_use_it(changed: str, used: str, unused: str) -> None:
    found = reached({Path(changed)})
    assert Path(used) in found
    assert Path(unused) not in found
