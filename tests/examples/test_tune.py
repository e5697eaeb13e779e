"""The example of population based training reaches the known optimum through the real runner; without it nothing does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.tune.two_slopes import (
    BEST_WITH_FIXED_H,
    ITERATIONS,
    OPTIMUM,
    best,
    population,
    random_search,
    replay,
    worth,
)


@pytest.mark.slow
def test_a_population_reaches_the_optimum_and_so_does_a_replay_of_its_best(tmp_path: Path) -> None:
    trials = population(str(tmp_path))
    assert [trial.status for trial in trials] == ["TERMINATED"] * 4
    assert [trial.last_result["training_iteration"] for trial in trials] == [ITERATIONS] * 4
    winner = best(trials)
    assert worth(winner) > OPTIMUM - 0.001
    rows = [json.loads(line) for line in (tmp_path / "population" / "pbt_global.txt").read_text().splitlines()]
    assert len(rows) == 2 * (ITERATIONS // 4 - 1)
    (replayed,) = replay(str(tmp_path), winner)
    assert worth(replayed) == pytest.approx(worth(winner), abs=1e-9)


@pytest.mark.slow
def test_random_search_with_the_same_budget_does_not(tmp_path: Path) -> None:
    trials = random_search(str(tmp_path))
    assert [trial.last_result["training_iteration"] for trial in trials] == [ITERATIONS] * 4
    assert all(worth(trial) <= BEST_WITH_FIXED_H for trial in trials)
