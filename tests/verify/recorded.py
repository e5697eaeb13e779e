"""A small run with receipts, recorded in a test's process by the orchestrator's own scheduler, finalizer and step boundary."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.mix import ExampleMix
from counterpoint.orchestrator.receipts.chain import ReceiptChain, repair
from counterpoint.orchestrator.receipts.receipt import groups_of, rules_of
from counterpoint.orchestrator.rollouts.transcripts import Transcriber
from counterpoint.orchestrator.run_directory import rewind
from counterpoint.orchestrator.scheduling.events import (
    BatchCommitted,
    CapacityChanged,
    Event,
    FinalizeGroup,
    Instruction,
    PolicyUpdated,
    RolloutEnded,
    ShipBatch,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.outcomes import RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.batch_form import choose_trained
from counterpoint.orchestrator.step.boundary import StepBoundary
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint, identity_of, load_newest
from counterpoint.orchestrator.step.finalize import Finalizer
from counterpoint.run.config import RunConfig
from counterpoint.run.receipts import RECEIPTS_FILE, newest_receipt
from counterpoint.trainer.runs.witness import note
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.records import Rollout
from tests.support.rollouts import make_turn

EXAMPLES = 7


def config_of(output_dir: Path, **fields: Any) -> RunConfig:
    """A run of small groups, whose model is never asked."""
    values: dict[str, Any] = {
        "run_id": "one",
        "output_dir": output_dir,
        "model": "none",
        "steps": 100,
        "environments": [EnvironmentConfig(name="toy", kind="none:None")],
        "schedule": {"group_size": 4, "rollouts_per_step": 8, "max_inflight_rollouts": 16},
        "inference": {"urls": ["http://127.0.0.1:1"]},
    }
    return RunConfig.model_validate(values | fields)


class RecordedRun:
    """A process of the run: `play` takes steps, and leaving it at any time is a kill."""

    def __init__(self, config: RunConfig, *, faulty: bool = False, players: bool = False) -> None:
        """With `faulty` rollouts fail, loop, or are left untrained now and then; with `players` two have rewards each."""
        self.config, self._faulty, self._players = config, faulty, players
        checkpoint = load_newest(config)
        newest = checkpoint.step if checkpoint is not None else 0
        rewind(config.run_dir, newest)
        repair(config.run_dir, newest)
        mix = ExampleMix(config.environments, {each.name: EXAMPLES for each in config.environments}, config.seed)
        self._scheduler = RolloutScheduler(config.schedule, config.steps, mix)
        self._advantage = load_advantage(config.advantage)
        self._finalizer = Finalizer(self._advantage, config.filters)
        self._boundary = StepBoundary(
            config.run_dir,
            config.run_id,
            {each.name: [] for each in config.environments},
            receipts=ReceiptChain(config.run_dir),
            transcribe=Transcriber(lambda sequences: ["".join(map(str, ids)) for ids in sequences], 1000),
        )
        self._groups: dict[int, list[Rollout]] = {}
        self._begun: list[tuple[str, int]] = []
        self._next = 0
        self._events: deque[Event] = deque([CapacityChanged(16), PolicyUpdated(newest)])
        self._random = random.Random(newest)
        if checkpoint is not None:
            self._scheduler.restore(checkpoint.scheduler)
            self._next = checkpoint.scheduler["next_group_id"]
        else:
            publish_weights(config.run_dir, 0)

    def play(self, steps: int) -> None:
        """Commits so many steps."""
        asyncio.run(self._play(steps))

    async def _play(self, steps: int) -> None:
        while steps:
            # The dispatcher ships in a task, after it has taken up all instructions.
            for instruction in sorted(
                self._scheduler.handle(self._events.popleft()), key=lambda each: type(each) is ShipBatch
            ):
                steps -= await self._execute(instruction)

    async def _execute(self, instruction: Instruction) -> bool:
        match instruction:
            case StartGroup(group_id, environment, example, size):
                if group_id >= self._next:
                    self._begun.append((environment, example))
                    self._next = group_id + 1
                version = self._scheduler.snapshot().policy_version or 0
                self._groups[group_id] = [
                    self._rollout(group_id, index, environment, example, version) for index in range(size)
                ]
                for each in self._groups[group_id]:
                    outcome_of = RolloutOutcome.COMPLETED if each.error is None else RolloutOutcome.FAILED
                    self._events.append(RolloutEnded(group_id, each.rollout_id, outcome_of, version))
            case FinalizeGroup(group_id):
                outcome = self._finalizer(self._groups[group_id], False)
                self._groups[group_id] = list(outcome.rollouts)
                self._events.append(outcome.event)
            case ShipBatch(step, group_ids):
                await self._ship(step, group_ids)
                self._events += [BatchCommitted(step), PolicyUpdated(step)]
                return True
        return False

    async def _ship(self, step: int, group_ids: tuple[int, ...]) -> None:
        rollouts = [rollout for group_id in group_ids for rollout in self._groups.pop(group_id)]
        choose_trained(step, rollouts, self._advantage)
        in_progress = self._boundary.begin(step, rollouts, [])
        await in_progress.merge()
        state = self._scheduler.state(ready=False)
        begun, self._begun = self._begun, []
        checkpoint = StepCheckpoint(step, identity_of(self.config), state, {}, [], {})
        facts = rules_of(self.config) | groups_of(group_ids, begun, state)
        await in_progress.complete(checkpoint, lambda: None, facts)
        publish_weights(self.config.run_dir, step)

    def _rollout(self, group_id: int, index: int, environment: str, example: int, version: int) -> Rollout:
        draw = self._random
        prompt = [draw.randrange(50) for _ in range(3)]
        first = [draw.randrange(50) for _ in range(draw.randrange(1, 6))]
        second = [draw.randrange(50) for _ in range(2)]
        turns = [make_turn(prompt, first, version), make_turn([*prompt, *first, 7], second, version)]
        reward = draw.choice([0.0, 0.0, 0.25, 1.0, 1.0, 1.5])
        rollout = Rollout(f"{group_id}-{index}", group_id, environment, example, turns=turns, reward=reward)
        if self._advantage.name in ("turn_returns", "anchor_states"):
            rollout.turn_rewards = np.array([draw.choice([0.0, 0.3, 0.7]), reward], np.float32)
            rollout.reward = reward = float(rollout.turn_rewards.sum())
            # A state may be noted; else it is the turn's prompt.
            rollout.state = {"turn_states": [{"room": draw.randrange(2)}, [0.5]]} if environment != "b" else {}
        if self._players:
            turns[:] = [replace(turn, player=player) for turn, player in zip(turns, ("one", "two"), strict=True)]
            rollout.player_rewards = {"one": reward, "two": draw.random()}
            if rollout.turn_rewards is not None:
                rollout.player_rewards = dict(zip(("one", "two"), rollout.turn_rewards.tolist(), strict=True))
        if self._faulty:
            match draw.randrange(12):
                case 0:
                    rollout.error = "it broke"
                case 1:
                    for turn in turns:
                        turn.leave_untrained()
                case 2:
                    turns[0] = replace(make_turn(prompt, [5] * 40, version), player=turns[0].player)
                    turns[1] = replace(
                        make_turn([9, 9], [6, 7], version, log_probabilities=[-20, -20]), player=turns[1].player
                    )
                case 3:
                    rollout.reward = float("nan")
        return rollout


def publish_weights(run_dir: Path, version: int) -> None:
    """What of a broadcast a receipt names, and what the trainer notes of it."""
    with publish_directory(run_dir / "broadcast" / f"step_{version}") as directory:
        digests = {"float32": {"": f"{version:016x}", "0": f"{np.uint64(version + 1):016x}"}}
        # A trainer of before there were digests publishes none.
        probe = {"version": version} | ({"digests": digests} if version % 3 else {})
        (directory / "probe.json").write_bytes(orjson.dumps(probe))
        _, receipt = newest_receipt(run_dir / RECEIPTS_FILE)
        note(run_dir.parent, "one", version, receipt.get("batch", ""), directory, durable=False)
