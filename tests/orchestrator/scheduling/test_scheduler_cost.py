"""What an event costs the scheduler does not grow with the groups under way. It is counted in bytecodes, so it is exact."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from counterpoint.orchestrator.scheduling.events import (
    BatchCommitted,
    Event,
    GroupFinalized,
    Instruction,
    PolicyUpdated,
    RolloutEnded,
    ShipBatch,
)
from counterpoint.orchestrator.scheduling.outcomes import RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.run.config import ScheduleConfig
from tests.orchestrator.scheduling.counting_mix import CountingMix

PER_STEP = 20
STEPS = 3


class Counted:
    """A scheduler, and the bytecodes that each of its events took, for each group that it named."""

    def __init__(self, groups: int) -> None:
        schedule = ScheduleConfig(
            group_size=1,
            rollouts_per_step=PER_STEP,
            max_inflight_rollouts=groups,
            max_lead_steps=groups,
            max_off_policy_steps=groups,
        )
        self.scheduler = RolloutScheduler(schedule, groups, CountingMix())
        self.costs: list[float] = []
        self._bytecodes = 0

    def handle(self, event: Event) -> list[Instruction]:
        self._bytecodes = 0
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            instructions = self.scheduler.handle(event)
        finally:
            sys.settrace(before)
        named = sum(len(each.group_ids) if isinstance(each, ShipBatch) else 1 for each in instructions)
        self.costs.append(self._bytecodes / (1 + named))
        return instructions

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        self._bytecodes += event == "opcode"
        return self._trace


def costs(groups: int) -> list[float]:
    """Returns the costs of a few steps: groups end in another order than they began, become ready, ship, and others start."""
    counted = Counted(groups)
    counted.handle(PolicyUpdated(0))
    shipped = 0
    for group_id in [each for each in range(groups) if each % 2] + [each for each in range(groups) if each % 2 == 0]:
        counted.handle(RolloutEnded(group_id, f"{group_id}-0", RolloutOutcome.COMPLETED, 0))
        for instruction in counted.handle(GroupFinalized(group_id, 1, 0)):
            if isinstance(instruction, ShipBatch):
                shipped = instruction.step
                counted.handle(BatchCommitted(shipped))
                counted.handle(PolicyUpdated(shipped))
        if shipped == STEPS:
            return counted.costs
    raise AssertionError("too few groups for the steps")


@pytest.mark.slow
def test_no_event_costs_more_with_many_groups_than_with_few() -> None:
    few, many = costs(200), costs(4000)
    assert sum(many) / len(many) <= 2 * sum(few) / len(few)
    assert max(many) <= 2 * max(few)
