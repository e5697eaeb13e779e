"""The worked example of `docs/scheduling.md` is what the scheduler does."""

from __future__ import annotations

from pathlib import Path

from counterpoint.orchestrator.scheduling.events import (
    BatchCommitted,
    CancelGroup,
    Event,
    FinalizeGroup,
    GroupFinalized,
    Instruction,
    PolicyUpdated,
    PolicyUpdateStarting,
    RolloutEnded,
    ShipBatch,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.outcomes import RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.run.config import ScheduleConfig
from tests.orchestrator.scheduling.counting_mix import CountingMix

PAGE = Path(__file__).parents[3] / "docs" / "scheduling.md"


def worked_example() -> list[tuple[str, str]]:
    """What happens, and what the scheduler is said to do, row by row."""
    section = PAGE.read_text().partition("## A worked example")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")]
    return [(happens.strip(), does.strip()) for happens, does in rows[1:]]


def rollouts_end(group_id: int, outcome: RolloutOutcome, version: int) -> list[Event]:
    return [RolloutEnded(group_id, f"{group_id}-{index}", outcome, version) for index in range(2)]


def completes(group_id: int, version: int) -> list[Event]:
    return [*rollouts_end(group_id, RolloutOutcome.COMPLETED, version), GroupFinalized(group_id, 2, 0)]


EVENTS: dict[str, list[Event]] = {
    "version 0 is loaded": [PolicyUpdated(0)],
    "groups 1, 2 complete": [*completes(1, 0), *completes(2, 0)],
    "step 1 is committed": [BatchCommitted(1)],
    "version 1 is loaded": [PolicyUpdateStarting(1), PolicyUpdated(1)],
    "groups 3, 4 complete": [*completes(3, 0), *completes(4, 1)],
    "step 2 is committed": [BatchCommitted(2)],
    "version 2 is loaded": [PolicyUpdateStarting(2), PolicyUpdated(2)],
    "group 0's rollouts end": rollouts_end(0, RolloutOutcome.CANCELLED, 0),
}


def in_words(instructions: list[Instruction]) -> str:
    words, starts = [], []
    for instruction in instructions:
        match instruction:
            case ShipBatch(step, group_ids):
                words.append(f"ships step {step} with {', '.join(map(str, group_ids))}")
            case CancelGroup(group_id):
                words.append(f"cancels {group_id}")
            case StartGroup(group_id):
                starts.append(str(group_id))
            case FinalizeGroup():
                pass  # part of completing
            case unexpected:
                raise AssertionError(unexpected)
    if starts:
        words.append(f"starts {', '.join(starts)}")
    return "; ".join(words) or "nothing"


def test_the_worked_example_is_what_happens() -> None:
    schedule = ScheduleConfig(
        group_size=2,
        rollouts_per_step=4,
        max_inflight_rollouts=8,
        max_lead_steps=2,
        max_off_policy_steps=2,
        stragglers="drop",
    )
    scheduler = RolloutScheduler(schedule, 100, CountingMix())
    page = worked_example()
    assert [happens for happens, _does in page] == list(EVENTS)
    for happens, does in page:
        instructions = [instruction for event in EVENTS[happens] for instruction in scheduler.handle(event)]
        assert in_words(instructions) == does, happens
