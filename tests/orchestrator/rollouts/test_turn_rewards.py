"""Rewards of turns: from the loop and the score into the rollout, its files and its records, each beside its turn."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest

from counterpoint.environments.base import Example, Model
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.reward import Reward
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play, score_group
from counterpoint.orchestrator.rollouts.rollout_file import (
    framed,
    frames,
    parse_rollouts,
    read_rollouts,
    rollout_buffers,
    write_rollouts,
)
from counterpoint.orchestrator.step.advantages import Advantage, group_mean
from counterpoint.orchestrator.step.finalize import Finalizer
from counterpoint.orchestrator.step.players import set_advantages
from counterpoint.orchestrator.step.records import rollout_record
from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.records import Int32Array, Rollout, Turn
from tests.orchestrator.toy_environment import Toy
from tests.support.rollouts import make_rollout, make_turn

SAMPLING = SamplingParameters(temperature=1.0, max_tokens=8, stop_token_ids=(1,))


class _Pool:
    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        return make_turn(prompt_ids.tolist(), [7, 1])


class Played(Toy):
    """Three turns, after which `reward` gives rewards and `score` returns what `total` says."""

    def __init__(
        self,
        reward: Callable[[Model], None],
        total: Callable[[Rollout], Any],
        late: Callable[[Model], None] = lambda model: None,
        group_scoring: bool = False,
    ) -> None:
        super().__init__(group_scoring=group_scoring)
        self._reward, self._total, self._late = reward, total, late
        self.model: Any = None

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        self.model = model
        for number in range(3):
            await model.generate([2 + number])
        self._reward(model)

    async def score(self, example: Example, rollout: Rollout) -> Any:
        self._late(self.model)
        return self._total(rollout)

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> list[Any]:
        return [self._total(rollout) for rollout in rollouts]


async def played(environment: Played, bounds: tuple[float, float] | None = None) -> Rollout:
    rollout = make_rollout(turns=[], reward=None, advantage=0.0)
    loaded = LoadedEnvironment(EnvironmentConfig(name="toy", kind="made:Here", reward_bounds=bounds), environment)
    await play(loaded, rollout, PolicyModel(rollout, cast(Chat, None), _Pool(), SAMPLING))
    if environment.group_scoring:
        await score_group(loaded, [rollout])
    return rollout


def values(rollout: Rollout) -> list[float] | None:
    return None if rollout.turn_rewards is None else rollout.turn_rewards.tolist()


def rewarding(*rewards: tuple[float, int | None]) -> Callable[[Model], None]:
    def reward(model: Model) -> None:
        for value, turn in rewards:
            model.reward(value, turn)

    return reward


def nothing(model: Model) -> None:
    """Gives no reward."""


@pytest.mark.parametrize("group_scoring", [False, True])
async def test_rewards_of_the_loop_add_up_to_the_total(group_scoring: bool) -> None:
    seen: list[Any] = []

    def total(rollout: Rollout) -> Reward:
        seen.append(values(rollout))
        return Reward()

    rollout = await played(Played(rewarding((0.5, None), (0.25, 0)), total, group_scoring=group_scoring))
    assert rollout.error is None
    assert (seen, values(rollout), rollout.reward) == ([[0.25, 0.0, 0.5]], [0.25, 0.0, 0.5], 0.75)


@pytest.mark.parametrize("group_scoring", [False, True])
async def test_a_score_may_give_the_rewards_of_turns(group_scoring: bool) -> None:
    rollout = await played(Played(nothing, lambda _: Reward(0.5, [0, 1, -0.5]), group_scoring=group_scoring))
    assert (rollout.error, values(rollout), rollout.reward) == (None, [0.0, 1.0, -0.5], 0.5)


async def test_without_rewards_of_turns_all_is_as_before() -> None:
    rollout = await played(Played(nothing, lambda _: 0.5))
    assert (rollout.error, values(rollout), rollout.reward) == (None, None, 0.5)
    assert all({"reward", "advantage"}.isdisjoint(turn) for turn in rollout_record(rollout, [])["turns"])


async def test_a_reward_may_come_late_until_the_rollout_ends() -> None:
    environment = Played(nothing, lambda _: Reward(), late=rewarding((2.0, 1)))
    rollout = await played(environment)
    assert (rollout.error, values(rollout), rollout.reward) == (None, [0.0, 2.0, 0.0], 2.0)
    for model in (environment.model, environment.model.player("white")):
        with pytest.raises(RuntimeError, match="has ended; its turns get no further reward"):
            model.reward(1.0)


@pytest.mark.parametrize("group_scoring", [False, True])
async def test_a_turn_that_comes_when_all_is_scored_has_no_reward(group_scoring: bool) -> None:
    """The environment does not wait for the turn's call, and the pool answers as soon as it is asked."""
    calls: list[asyncio.Task[Turn]] = []

    def reward(model: Model) -> None:
        model.reward(0.5, 1)
        calls.append(asyncio.create_task(model.generate([9])))

    rollout = await played(Played(reward, lambda _: Reward(), group_scoring=group_scoring))
    assert calls[0].done()
    assert (rollout.error, values(rollout), rollout.reward) == (None, [0.0, 0.5, 0.0, 0.0], 0.5)
    (kept,) = Finalizer(Advantage("group_mean", group_mean), [])([rollout], group_scoring).rollouts
    assert (kept.error, len(kept.turns)) == (None, 4)


@pytest.mark.parametrize("group_scoring", [False, True])
@pytest.mark.parametrize(
    ("reward", "total", "error"),
    [
        (rewarding((float("nan"), 1)), Reward(), r"ValueError: the reward of turn 1 is nan .*test_turn_rewards.py"),
        (rewarding((1.0, 3)), Reward(), r"ValueError: a reward for turn 3; the rollout has 3 turns"),
        (rewarding((1.0, 2), (1.0, None)), Reward(), r"ValueError: turn 2 has the reward 1 already"),
        (rewarding((1.0, 2)), 2.0, r"NoReward: score\w* returned 2\.0, and the rewards of the turns add up to 1\.0"),
        (
            rewarding((1.0, 2)),
            Reward(turns=[0, 0, 2.0]),
            r"NoReward: score\w* returned 2\.0 for turn 2; .* gave it 1 before",
        ),
        (nothing, Reward(turns=[1.0]), r"NoReward: score\w* returned 1 rewards for 3 turns"),
        (nothing, Reward(turns=[1.0, -0.5, 0.5]), r"environment 'toy': the reward of turn 1 is -0\.5, .* are \[0, 1\]"),
        (nothing, Reward(turns=[0.5, 0.5, 0.5]), r"environment 'toy': the reward is 1\.5, .* are \[0, 1\]"),
    ],
)
async def test_a_rollout_with_rewards_that_cannot_be_fails_by_name(
    reward: Callable[[Model], None], total: Any, error: str, group_scoring: bool
) -> None:
    rollout = await played(Played(reward, lambda _: total, group_scoring=group_scoring), bounds=(0.0, 1.0))
    assert rollout.error is not None
    assert rollout.reward is None
    assert re.search(error, rollout.error)
    assert rollout.turn_rewards is None or len(rollout.turn_rewards) == len(rollout.turns)


def rewarded(**fields: Any) -> Rollout:
    turns = [make_turn([1], [2]), make_turn([1, 2, 3], [4])]
    rewards, advantages = np.array([0.25, -1.0], np.float32), np.array([0.5, -0.125], np.float32)
    values: dict[str, Any] = {"turn_rewards": rewards, "turn_advantages": advantages, "reward": -0.75}
    return make_rollout(turns=turns, **(values | fields))


def test_files_and_records_have_them(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.bin", [rewarded(), make_rollout()])
    read, plain = read_rollouts(tmp_path / "rollouts.bin")
    assert (plain.turn_rewards, plain.turn_advantages) == (None, None)
    assert values(read) == [0.25, -1.0]
    assert read.turn_advantages is not None
    assert read.turn_advantages.tolist() == [0.5, -0.125]
    line = orjson.loads(orjson.dumps(rollout_record(read, [])))
    assert [(turn["reward"], turn["advantage"]) for turn in line["turns"]] == [(0.25, 0.5), (-1.0, -0.125)]
    copy = read.with_turns(list(read.turns))
    assert copy.turn_rewards is read.turn_rewards


def test_a_file_that_is_older_or_damaged(tmp_path: Path) -> None:
    """A file of before has neither array; one with fewer values than turns is damaged."""

    def parsed(**changed: Any) -> Rollout:
        data = b"".join(as_bytes_view(buffer) for buffer in rollout_buffers(rewarded()))
        (header, arrays), *turns = frames(memoryview(data))
        kept = {name: array for name, array in (arrays | changed).items() if array is not None}
        parts = [buffer for frame in ((header, kept), *turns) for buffer in framed(*frame)]
        (rollout,) = parse_rollouts(memoryview(b"".join(as_bytes_view(buffer) for buffer in parts)))
        return rollout

    older = parsed(turn_rewards=None, turn_advantages=None)
    assert (older.turn_rewards, older.turn_advantages, older.reward) == (None, None, -0.75)
    for wrong in (np.zeros(1, np.float32), np.zeros(2, np.int32), np.zeros((2, 1), np.float32)):
        with pytest.raises(
            ValueError, match=r"rollout 0 is damaged: .*turn_rewards has .* for 2 turns; expected a float32 each"
        ):
            parsed(turn_rewards=wrong)


@pytest.mark.parametrize(
    ("rewards", "fault"),
    [
        (np.array([0.5], np.float32), r"turn_rewards has shape \(1,\) of float32 for 2 turns; expected a float32 each"),
        (np.array([0.5, 0.5]), r"turn_rewards has shape \(2,\) of float64 for 2 turns"),
        (np.array([0.5, np.nan], np.float32), "the reward of turn 1 is nan; expected a finite number"),
        (np.array([3e38, -3e38], np.float32), r"the rewards of turns add up to 6e\+38 in size; .* at most 3\.4e\+38"),
    ],
)
def test_a_group_is_finalized_with_them_and_a_rollout_with_wrong_ones_fails(rewards: Any, fault: str) -> None:
    group = [rewarded(), rewarded(rollout_id="0-1", turn_rewards=rewards)]
    outcome = Finalizer(Advantage("group_mean", group_mean), [])(group, group_scoring=False)
    good, bad = outcome.rollouts
    assert (good.error, values(good)) == (None, [0.25, -1.0])
    assert bad.error is not None
    assert re.search(fault, bad.error)


def test_an_advantage_function_sees_those_of_the_player() -> None:
    seen: list[Any] = []

    def function(inputs: Any) -> Any:
        seen.extend(values(rollout) for rollout in inputs.rollouts)
        return group_mean(inputs)

    turns = [replace(make_turn([1], [2]), player=player) for player in ("white", "black", "white")]
    rewards = np.array([1.0, 2.0, 4.0], np.float32)
    game = make_rollout(turns=turns, turn_rewards=rewards, player_rewards={"black": 2.0, "white": 5.0})
    set_advantages(Advantage("own", function), [game])
    assert seen == [[2.0], [1.0, 4.0]]
