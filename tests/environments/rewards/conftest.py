"""Rubrics that are closed after a test, whatever it did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from counterpoint.environments.rewards.rubric import Rubric

MakeRubric = Callable[..., Rubric]


@pytest.fixture
async def rubric() -> AsyncIterator[MakeRubric]:
    """Makes a rubric of parts, each given as a table."""
    made: list[Rubric] = []

    def make(*parts: dict[str, Any], processes: int = 1) -> Rubric:
        made.append(Rubric(parts, processes))
        return made[-1]

    yield make
    for each in made:
        await each.close()
