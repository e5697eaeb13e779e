"""Measures the scheduler's time for an event, with 100 to 10,000 groups of one rollout in progress.

    python -m perf.bench.events [--quick | --full]

No dispatcher and no server: rollouts end in the order in which they began, every group is kept, each step is committed at once.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

from orchestrator.loop_health.gc_tuning import freeze_gc, infrequent_gc
from orchestrator.scheduling.events import (
    BatchCommitted,
    Event,
    FinalizeGroup,
    GroupFinalized,
    GroupsBegun,
    Instruction,
    MoreToStart,
    PolicyUpdated,
    RolloutEnded,
    ShipBatch,
    StartGroup,
)
from orchestrator.scheduling.outcomes import RolloutOutcome
from orchestrator.scheduling.scheduler import Scheduler
from perf.bench.command import Size, show
from perf.figures import Case, Figure
from run.config import ScheduleConfig

GROUPS = (100, 1_000, 10_000)
EVENTS_A_GROUP = 3
ROLLOUTS_PER_STEP = 64
LEAD = 1_000_000
"""Steps of lead and of staleness: no limit."""


def measure(size: Size) -> list[Case]:
    """Measures the case `events`, in 2 s, or less when quick."""
    events = EVENTS_A_GROUP * GROUPS[-1] // size.pick(3, 1, 1)
    with infrequent_gc():
        freeze_gc()
        seconds = {groups: _handle(groups, events) for groups in GROUPS}
    means = {groups: sum(each) / len(each) for groups, each in seconds.items()}
    least, most = GROUPS[0], GROUPS[-1]
    figures = [Figure("events each", events, "")]
    for groups, each in seconds.items():
        figures += [
            Figure(f"an event with {groups:,} groups: mean", 1e6 * means[groups], "us"),
            Figure(f"an event with {groups:,} groups: longest", 1e3 * max(each), "ms"),
        ]
    figures.append(Figure(f"mean with {most:,} groups over {least}", means[most] / means[least], "x", 2.0))
    return [Case("events", figures)]


def _handle(groups: int, events: int) -> array[float]:
    """Returns the CPU seconds of this thread for each of so many events."""
    schedule = ScheduleConfig(
        group_size=1,
        rollouts_per_step=ROLLOUTS_PER_STEP,
        max_inflight_rollouts=groups,
        max_lead_steps=LEAD,
        max_off_policy_steps=LEAD,
    )
    scheduler = Scheduler(schedule, LEAD, _Examples())
    seconds = array("d")
    due: deque[Event] = deque([PolicyUpdated(0)])
    while len(seconds) < events:
        event = due.popleft()
        began = time.thread_time()
        instructions = scheduler.handle(event)
        seconds.append(time.thread_time() - began)
        due.extend(answer for each in instructions if (answer := _answer(each)) is not None)
    return seconds


def _answer(instruction: Instruction) -> Event | None:
    match instruction:
        case StartGroup(group_id):
            return RolloutEnded(group_id, f"{group_id}-0", RolloutOutcome.COMPLETED, 0)
        case MoreToStart():
            return GroupsBegun()
        case FinalizeGroup(group_id):
            return GroupFinalized(group_id, kept=1, filtered=0)
        case ShipBatch(step):
            return BatchCommitted(step)
        case _:
            return None


class _Examples:
    """Examples that are all alike."""

    def next(self) -> tuple[str, int]:
        return "short", 0

    def observe(self, environment: str, index: int, rewards: Sequence[float]) -> None:
        pass

    def drawn_in_vain(self, environment: str) -> None:
        pass

    def take_metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


if __name__ == "__main__":
    show(measure)
