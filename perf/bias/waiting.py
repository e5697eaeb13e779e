"""What the real scheduler does to a slow group: in which step it is trained, if at all, and how old each of its turns is then.

A turn lasts as long as a step of the trainer. The group plays beside groups of one turn each, which fill the steps meanwhile.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Literal

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.mix import ExampleMix
from counterpoint.orchestrator.scheduling.events import (
    BatchCommitted,
    CancelGroup,
    Event,
    FinalizeGroup,
    GroupFinalized,
    PolicyUpdated,
    RolloutEnded,
    ShipBatch,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.outcomes import RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.run.config import ScheduleConfig

_SLOW = 0
"""The id of the group in question, the first that starts."""


@cache
def ages_when_trained(turns: int, stragglers: Literal["wait", "drop"], staleness: int) -> tuple[int, ...] | None:
    """Returns the age of each turn in updates when its group, which lasts `turns` turns, is trained; None if it is dropped.

    `staleness` is the largest age that the run allows: `max_off_policy_steps` - 1.
    """
    schedule = ScheduleConfig(
        group_size=1,
        rollouts_per_step=1,
        max_lead_steps=min(2, staleness + 1),
        max_off_policy_steps=staleness + 1,
        stragglers=stragglers,
    )
    mix = ExampleMix([EnvironmentConfig(name="any", kind="reverse-text")], {"any": 1000}, 0)
    scheduler = RolloutScheduler(schedule, 100, mix)
    left: dict[int, int] = {}
    played_by: list[int] = []
    version = 0
    events: deque[Event] = deque([PolicyUpdated(version)])
    while events:
        while events:
            event = events.popleft()
            for instruction in scheduler.handle(event):
                match instruction:
                    case StartGroup():
                        left[instruction.group_id] = turns if instruction.group_id == _SLOW else 1
                    case FinalizeGroup():
                        events.append(GroupFinalized(instruction.group_id, kept=1, filtered=0))
                    case ShipBatch():
                        if _SLOW in instruction.group_ids:
                            return tuple(instruction.step - 1 - each for each in played_by)
                        version = instruction.step
                        events += [BatchCommitted(version), PolicyUpdated(version)]
                    case CancelGroup(group_id=group_id) if group_id == _SLOW:
                        return None
        for group_id in sorted(left):
            if group_id == _SLOW:
                played_by.append(version)
            left[group_id] -= 1
            if not left[group_id]:
                del left[group_id]
                oldest = played_by[0] if group_id == _SLOW else version
                events.append(RolloutEnded(group_id, f"{group_id}-0", RolloutOutcome.COMPLETED, oldest))
        if not events and left:
            events.append(PolicyUpdated(version))
    raise AssertionError("nothing is in progress, and the slow group was neither trained nor dropped")
