"""The scheduler over a real mix with a curriculum: its events alone give the instructions, and the state those that follow."""

from __future__ import annotations

import random
from collections import deque

import msgpack

from counterpoint.environments.config import CurriculumConfig, EnvironmentConfig
from counterpoint.environments.mix import ExampleMix
from counterpoint.orchestrator.scheduling.events import (
    BatchCommitted,
    CancelGroup,
    Event,
    FinalizeGroup,
    GroupFinalized,
    Instruction,
    PolicyUpdated,
    RolloutEnded,
    ShipBatch,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.outcomes import RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.run.config import ScheduleConfig

STEPS = 12
SCHEDULE = ScheduleConfig(group_size=2, rollouts_per_step=8, max_inflight_rollouts=16)


def make_scheduler() -> RolloutScheduler:
    configs = [
        EnvironmentConfig(name="a", kind="reverse-text", curriculum=CurriculumConfig(rest=1, explore=0.4)),
        EnvironmentConfig(name="b", kind="reverse-text", ratio=0.5),
    ]
    return RolloutScheduler(SCHEDULE, STEPS, ExampleMix(configs, {"a": 30, "b": 30}, seed=3))


def play(scheduler: RolloutScheduler, seed: int, steps: int, shipped: int = 0) -> tuple[list[Event], list[Instruction]]:
    """Plays groups that end in any order, half of them filtered, from step `shipped` on until so many have shipped."""
    chance = random.Random(seed)
    events: list[Event] = []
    instructions: list[Instruction] = []
    running: list[StartGroup] = []
    due: deque[Event] = deque([PolicyUpdated(shipped)])
    while shipped < steps:
        if not due:
            start = running.pop(chance.randrange(len(running)))
            names = [f"{start.group_id}-{index}" for index in range(start.size)]
            due.extend(RolloutEnded(start.group_id, name, RolloutOutcome.COMPLETED, shipped) for name in names)
        events.append(due.popleft())
        for instruction in scheduler.handle(events[-1]):
            instructions.append(instruction)
            match instruction:
                case StartGroup():
                    running.append(instruction)
                case FinalizeGroup(group_id):
                    rewards = tuple(chance.choice([0.0, 1.0]) for _ in range(SCHEDULE.group_size))
                    kept = 0 if len(set(rewards)) == 1 else len(rewards)
                    due.append(GroupFinalized(group_id, kept, len(rewards) - kept, rewards=rewards))
                case CancelGroup(group_id):
                    running = [each for each in running if each.group_id != group_id]
                case ShipBatch(shipped):
                    due.extend([BatchCommitted(shipped), PolicyUpdated(shipped)])
    return events, instructions


def test_the_same_events_give_the_same_examples() -> None:
    played, replayed = make_scheduler(), make_scheduler()
    events, instructions = play(played, 1, STEPS)
    assert [each for event in events for each in replayed.handle(event)] == instructions
    assert replayed.state() == played.state()
    drawn = [each.example_index for each in instructions if isinstance(each, StartGroup) and each.environment == "a"]
    epochs = ExampleMix([EnvironmentConfig(name="a", kind="reverse-text")], {"a": 30}, seed=3)
    assert drawn != [epochs.next()[1] for _ in drawn], "the curriculum decided"


def test_a_state_between_two_events_gives_the_examples_that_follow() -> None:
    """As at a drain: with the ready groups, and their rewards, which count only when these ship."""
    played, resumed = make_scheduler(), make_scheduler()
    play(played, 2, 5)
    resumed.restore(msgpack.unpackb(msgpack.packb(played.state())))
    again = make_scheduler()
    again.restore(played.state())
    assert play(resumed, 3, STEPS, 5) == play(again, 3, STEPS, 5)
    assert resumed.state() == again.state()
