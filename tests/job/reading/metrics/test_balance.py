"""Which side of a run waits, and what would end it."""

from __future__ import annotations

from typing import Any

import pytest

from counterpoint.job.reading.metrics.balance import Idle, advice, idle_of
from counterpoint.run.config import ScheduleConfig


def schedule(**values: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate({"rollouts_per_step": 56, "max_inflight_rollouts": 256} | values)


def test_shares_are_of_all_lines_together() -> None:
    shipped = [{"phase/wait_trainer": 1.0, "wall_seconds": 4.0}, {"wall_seconds": 4.0}]
    trained = [{"phase/wait": 3.0, "phase/train": 6.0, "phase/broadcast": 1.0}]
    assert idle_of(shipped, trained) == Idle(0.3, 0.125)
    assert idle_of([], []) == Idle(None, None)


@pytest.mark.parametrize(
    ("idle", "servers", "values", "words"),
    [
        (Idle(0.41, 0.0), 3, {}, "the trainer waits 41%: 2 more servers, or rollouts_per_step = 96"),
        (Idle(0.41, 0.0), 3, {"max_inflight_rollouts": 128}, "the trainer waits 41%: 2 more servers"),
        (Idle(0.41, 0.0), 0, {"max_inflight_rollouts": 128}, "the trainer waits 41%"),
        (Idle(0.41, 0.0), 0, {"max_inflight_rollouts": "auto"}, "the trainer waits 41%: rollouts_per_step = 96"),
        (Idle(0.0, 0.5), 4, {}, "the servers wait 50%: 2 fewer servers, or trainer.processes = 2"),
        (Idle(None, 0.3), 1, {}, "the servers wait 30%: trainer.processes = 2"),
        (Idle(0.09, 0.05), 3, {}, ""),
        (Idle(None, None), 3, {}, ""),
        (Idle(1.0, 0.0), 3, {}, ""),
    ],
)
def test_who_waits_and_what_ends_it(idle: Idle, servers: int, values: dict[str, Any], words: str) -> None:
    assert advice(idle, schedule(**values), servers, 1) == words
