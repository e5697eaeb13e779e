"""Rollouts in workers: the same turns, tokens and masks as without, whatever the environment does with the model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.lifecycle import started
from counterpoint.environments.workers.load import load_environment
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play, score_group
from counterpoint.transport.records import Rollout
from tests.environments.workers.playing import KIND, Servers, playing, wait_until

pytestmark = pytest.mark.slow


async def test_turns_and_masks_are_those_of_an_environment_without_workers(tmp_path: Path, model: Path) -> None:
    async with playing(tmp_path, model) as each:
        well = await each.play("well")
        assert well.error is None
        assert (well.reward, well.metrics) == (2.0, {"turns": 2})
        assert well.answer == f"right {well.example_index}"
        assert well.state["started"] == "mine"
        assert well.state["long"] == 2**70 + 1
        assert well.state["turns"] == [turn.completion_ids.tolist() for turn in well.turns]
        assert well.branches is not None
        assert [branch.token_ids_T.tolist() for branch in well.branches] == [[1, 2, 3, 3, 6, 1, 9, 7, 25, 2]]
        assert [turn.policy_version for turn in well.turns] == [3, 3]
        (routing,) = {sum(len(chunk) for chunk in branch.routed_experts) for branch in well.branches}
        assert routing == 9, "the routing stays here, complete"

        branching = await each.play("branch")
        assert branching.state["turns"][1:] == [
            turn.prompt_ids.tolist() + turn.completion_ids.tolist() for turn in branching.turns[1:]
        ]
        assert [turn.prompt_ids.tolist()[-1] for turn in branching.turns] == [3, 7, 8, 9]

        overlapping = await each.play("overlap")
        played = [turn.prompt_ids.tolist() + turn.completion_ids.tolist() for turn in overlapping.turns[1:]]
        assert sorted(played) == sorted(overlapping.state["turns"])

        given_up = await each.play("cancel")
        assert given_up.error is None
        assert given_up.state["gave up"]
        assert [turn.prompt_ids.tolist() for turn in given_up.turns] == [[1, 2, 3], [4]]

        game = await each.play("players")
        assert game.error is None
        assert [turn.player for turn in game.turns] == ["", "white", "black"]
        assert game.state["players"] == ["white", "black"]
        assert game.player_rewards == {"white": 1.0, "black": -1.0}
        (opponent_turn,) = game.opponent_turns
        assert (opponent_turn.opponent, opponent_turn.before) == ("other", 2)
        assert opponent_turn.completion_tokens == len(game.state["said"])

        rewarded = await each.play("rewarded")
        assert rewarded.error is None
        assert rewarded.turn_rewards is not None
        assert rewarded.turn_rewards.tolist() == [0.5, -0.25, 0.125]
        assert rewarded.player_rewards == {"": 0.5, "white": -0.25, "black": 0.125}
        assert rewarded.metrics == {"turns": 3, "seen": 0.375}
        assert rewarded.state["refused"] == [
            "a reward for the opponent 'other': its turns are not the rollout's; give it to a turn of the policy",
            "turn 1 is of player 'white', not of 'black'",
        ]
        twice = await each.play("twice")
        assert "turn 0 has the reward 0.5 already" in str(twice.error)
        assert "faulty.py" in str(twice.error)

        excused = await each.play("unavailable")
        assert "Unavailable: the judge is down" in str(excused.error)
        assert each.model is not None
        assert each.model.inference_failed(60.0), "what the environment needs is down: no fault of its own"
        failed = await each.play("raise")
        assert failed.error is not None
        assert failed.answer == f"right {failed.example_index}"
        assert not each.model.inference_failed(60.0)

        untrained = await each.play("untrained")
        assert bytes(untrained.turns[0].untrained) == b"\x00\x01\x01"
        constrained = await each.play("constrained")
        assert [turn.trained_tokens for turn in constrained.turns] == [3, 0]


async def test_a_group_is_scored_by_one_worker_with_all_that_it_left(tmp_path: Path, model: Path) -> None:
    async with playing(tmp_path, model, args={"group_scoring": True}) as each:
        assert each.environment.group_scoring
        rollouts = await asyncio.gather(*(each.play("well") for _ in range(4)))
        assert {rollout.reward for rollout in rollouts} == {None}
        await score_group(each.loaded, rollouts)
        assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0, 3.0]
        assert [rollout.error for rollout in rollouts] == [None] * 4
        assert all(rollout.metrics == {"of": 4} for rollout in rollouts)
        assert all(rollout.state["turns"] for rollout in rollouts)
        assert [bytes(rollout.turns[0].untrained) for rollout in rollouts] == [b"\x01\x00\x00"] * 4
        assert {worker.deaths for worker in each.pool.workers} == {0}
        (rewarded,) = [await each.play("rewarded")]
        assert rewarded.turn_rewards is not None
        assert rewarded.turn_rewards.tolist() == [0.5, -0.25, 0.125], "score_group comes later"
        await score_group(each.loaded, [rewarded])
        assert "score_group returned" in str(rewarded.error)


async def test_rollouts_go_to_the_least_loaded_worker_and_wait_when_all_are_full(tmp_path: Path, model: Path) -> None:
    async with playing(tmp_path, model, worker_sessions=2) as each:
        hanging = [asyncio.create_task(each.play("hang")) for _ in range(4)]
        await wait_until(lambda: len(each.servers.asked) == 4)
        assert [len(worker.sessions) for worker in each.pool.workers] == [2, 2]
        waiting = asyncio.create_task(each.play("well"))
        await asyncio.sleep(0)
        hanging[0].cancel()
        assert (await waiting).reward == 2.0
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)


async def test_a_long_context_travels_once(tmp_path: Path, model: Path) -> None:
    async with playing(tmp_path, model, workers=1) as each:
        sent: list[int] = []
        received = each.pool._handle

        def counting(worker: object, message: list[object]) -> None:
            sent.extend(len(part) for part in message if isinstance(part, bytes))
            received(worker, message)

        each.pool._handle = counting
        assert (await each.play("well")).error is None
        assert sent == [3 * 4, 4], "the prompt, and then only what it adds"


def test_the_class_is_never_imported_here() -> None:
    with pytest.raises(ValueError, match=r"environment 'x': kind = 'guess-numbr' .*'guess-number'\?"):
        load_environment(EnvironmentConfig(name="x", kind="guess-numbr", workers=1))
    with pytest.raises(ValueError, match=r"args: .*'large'.*did you mean 'largest'\?"):
        load_environment(EnvironmentConfig(name="x", kind=KIND, args={"large": 1}, workers=1))
    environment = load_environment(EnvironmentConfig(name="x", kind="guess-number", args={"largest": 20}, workers=1))
    assert len(environment) == 20


async def test_a_worker_runs_code_that_sets_alarms_in_its_main_thread(tmp_path: Path, model: Path) -> None:
    """The code is the verifiers library's; its environments run in a thread where they have no process of their own."""
    config = EnvironmentConfig(
        name="sums",
        kind="verifiers",
        workers=1,
        args={"id": "tests.environments.verifiers_library.samples.hidden_sums"},
    )
    environment = load_environment(config)
    async with started(environment, EnvironmentContext("sums", tmp_path, model, 0)):
        rollout = Rollout("0-0", 0, "sums", 0)
        parameters = SamplingParameters(temperature=1.0, max_tokens=8, stop_token_ids=(2,))
        playing_model = PolicyModel(rollout, Chat(model), Servers(), parameters, {})
        await play(LoadedEnvironment(config, environment), rollout, playing_model)
    assert (rollout.error, rollout.reward) == (None, 0.0)
    assert len(rollout.turns) == 1
