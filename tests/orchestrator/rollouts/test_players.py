"""Several players in one rollout, each with a reward of its own, and opponents, which are recorded and never trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from counterpoint.environments.base import Example, Model
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.inference.base import InferenceError, SamplingParameters
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play
from counterpoint.orchestrator.rollouts.rollout_file import read_rollouts, write_rollouts
from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.step.advantages import Advantage, AdvantageError, group_mean
from counterpoint.orchestrator.step.finalize import Finalizer
from counterpoint.orchestrator.step.players import set_advantages
from counterpoint.orchestrator.step.records import rollout_record
from counterpoint.orchestrator.step.step_metrics import step_metrics
from counterpoint.run.config import ZeroAdvantageFilter
from counterpoint.transport.records import Int32Array, Rollout, Turn
from tests.orchestrator.toy_environment import Toy
from tests.support.rollouts import make_rollout, make_turn

SAMPLING = SamplingParameters(temperature=1.0, max_tokens=8, stop_token_ids=(1,))
MEAN = Advantage("group_mean", group_mean)


class _Text:
    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


CHAT = cast(Chat, _Text())


class _Pool:
    """Completes every prompt with one token of its own and the end."""

    def __init__(self, token: int, error: Exception | None = None) -> None:
        self._token, self._error = token, error
        self.affinities: list[str] = []

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        self.affinities.append(affinity)
        if self._error is not None:
            raise self._error
        return make_turn(prompt_ids.tolist(), [self._token, 1], start=routed_experts_start)


class Duel(Toy):
    """White and black take two turns each, one prompt extending the other's game; their rewards are given."""

    def __init__(self, rewards: Any, opponent: str = "") -> None:
        super().__init__()
        self._rewards, self._opponent = rewards, opponent

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        game = [2]
        for _ in range(2):
            for name in ("white", "black"):
                asked = model.opponent(self._opponent) if name == "black" and self._opponent else model.player(name)
                turn = await asked.generate(game)
                game = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]

    async def score(self, example: Example, rollout: Rollout) -> Any:
        return self._rewards


async def played(rewards: Any, index: int = 0, opponents: Mapping[str, _Pool] | None = None, who: str = "") -> Rollout:
    rollout = make_rollout(4, index, turns=[], reward=None, advantage=0.0)
    config = EnvironmentConfig(name="toy", kind="made:Here")
    model = PolicyModel(rollout, CHAT, _Pool(7), SAMPLING, opponents)
    await play(LoadedEnvironment(config, Duel(rewards, who)), rollout, model)
    return rollout


async def test_each_player_is_trained_by_its_own_advantage() -> None:
    group = [await played(rewards, i) for i, rewards in enumerate([{"white": 1, "black": 0}, {"white": 0, "black": 1}])]
    assert [rollout.error for rollout in group] == [None, None]
    outcome = Finalizer(MEAN, [ZeroAdvantageFilter()])(group, False)
    assert outcome.event.kept == 2, "the mean reward of every rollout is the same, and each has an advantage"
    for rollout, sign in zip(outcome.rollouts, (1, -1), strict=True):
        assert rollout.player_advantages == {"white": sign * 0.5, "black": sign * -0.5}
        white, black = merge_rollout(rollout)
        for sample, advantage, reward in ((white, sign * 0.5, sign == 1), (black, sign * -0.5, sign == -1)):
            trained = sample.loss_mask_T.astype(bool)
            assert trained.sum() == 4, "two turns of two tokens"
            assert set(sample.advantages_T[trained].tolist()) == {advantage}
            assert not sample.advantages_T[~trained].any()
            assert sample.reward == float(reward)
    samples = [sample for rollout in outcome.rollouts for sample in merge_rollout(rollout)]
    line = step_metrics(assemble_batch("one", 1, samples), outcome.rollouts)
    assert (line["reward/mean"], line["reward/toy/player/white/mean"]) == (0.5, 0.5)


async def test_players_with_one_reward_share_the_advantage_of_their_rollout() -> None:
    outcome = Finalizer(MEAN, [])([await played(1.0, 0), await played(0.0, 1)], False)
    first = merge_rollout(outcome.rollouts[0])
    assert len(first) == 2
    assert {float(sample.advantages_T.max()) for sample in first} == {0.5}


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({"white": 1.0}, "turn 1 is of player 'black', and there are rewards for 'white'"),
        ({"white": 1.0, "black": float("nan")}, "score returned nan (float) for player 'black'"),
        ({"white": "1", "black": 0}, "expected a number"),
        ({}, "rewards by player are empty"),
    ],
)
async def test_rewards_that_do_not_fit_the_players_fail_the_rollout(rewards: Any, said: str) -> None:
    outcome = Finalizer(MEAN, [])([await played(rewards)], False)
    assert said in (outcome.rollouts[0].error or "")


def test_a_group_has_rewards_by_player_or_none() -> None:
    group = [make_rollout(player_rewards={"": 1.0}), make_rollout()]
    with pytest.raises(AdvantageError, match="expected either"):
        set_advantages(MEAN, group)


def test_a_player_without_a_turn_is_no_part_of_its_players_mean() -> None:
    turns = [make_turn([1, 2], [3, 1])]
    group = [
        make_rollout(index=index, turns=turns, player_rewards={"": float(index), "idle": 9.0}) for index in range(2)
    ]
    set_advantages(MEAN, group)
    assert [rollout.player_advantages for rollout in group] == [{"": -0.5}, {"": 0.5}]


async def test_an_opponent_is_recorded_and_neither_trained_nor_counted(tmp_path: Path) -> None:
    frozen = _Pool(9)
    rollout = await played(1.0, opponents={"frozen": frozen}, who="frozen")
    assert frozen.affinities == ["4-0", "4-0"]
    assert [turn.player for turn in rollout.turns] == ["white", "white"]
    assert [(each.opponent, each.before, each.completion) for each in rollout.opponent_turns] == [
        ("frozen", 1, "9 1"),
        ("frozen", 2, "9 1"),
    ]
    outcome = Finalizer(MEAN, [])([rollout], False)
    (sample,) = merge_rollout(outcome.rollouts[0])
    trained = sample.token_ids_T[sample.loss_mask_T.astype(bool)]
    assert trained.tolist() == [7, 1, 7, 1], "what the opponent said is read, and not trained"
    line = step_metrics(assemble_batch("one", 1, [sample]), outcome.rollouts)
    assert line["tokens/completion"] == 4
    assert rollout_record(outcome.rollouts[0], [])["opponent_turns"] == rollout.opponent_turns
    write_rollouts(tmp_path / "rollouts.bin", outcome.rollouts)
    (read,) = read_rollouts(tmp_path / "rollouts.bin")
    assert read.opponent_turns == rollout.opponent_turns
    assert [turn.player for turn in read.turns] == ["white", "white"]
    np.testing.assert_array_equal(merge_rollout(read)[0].advantages_T, sample.advantages_T)


async def test_an_opponent_that_does_not_answer_is_no_failure_of_the_environment() -> None:
    rollout = await played(1.0, opponents={"gone": _Pool(9, InferenceError("it is down"))}, who="gone")
    assert rollout.inference_failed
    assert "it is down" in (rollout.error or "")


async def test_an_opponent_that_is_not_configured_is_named() -> None:
    rollout = await played(1.0, opponents={"frozen": _Pool(9)}, who="forzen")
    assert "there is no opponent 'forzen'; [opponents] names frozen" in (rollout.error or "")
    assert not rollout.inference_failed
