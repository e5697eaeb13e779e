"""What every test file shares: property tests are deterministic and have no time limit of their own on a busy machine; the
built-in models are built once, into the user's cache, by the first test that asks for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("counterpoint", deadline=None, derandomize=True, database=None)
settings.load_profile("counterpoint")


@pytest.fixture(scope="session")
def tiny_moe() -> Path:
    """The directory of the warmed-up `tiny-moe`. Building it takes most of a minute: mark the test slow and give it time."""
    from trainer.make_model import make_model

    return make_model("tiny-moe")


@pytest.fixture(scope="session")
def tiny_dense() -> Path:
    """Likewise `tiny-dense`."""
    from trainer.make_model import make_model

    return make_model("tiny-dense")
