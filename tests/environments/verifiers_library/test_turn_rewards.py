"""Rewards of single turns: those that an author names, and those of OpenEnv's steps; each reaches the turn that earned it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from counterpoint.environments.chat import Chat
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.environments.verifiers_library.turn_rewards import NoSuchTurn, turn_rewards
from tests.environments.verifiers_library.conftest import Running
from tests.environments.verifiers_library.test_environment import played

# The library is imported in three seconds.
pytestmark = pytest.mark.slow


async def test_a_reward_is_that_of_the_answer_it_names_and_the_rest_the_last_ones(chat: Chat, running: Running) -> None:
    async with running("stepwise") as environment:
        rollout = await played(environment, ScriptedModel(chat, ["0", "x", "2"]))
        assert rollout.turn_rewards is not None
        assert (rollout.turn_rewards.tolist(), rollout.reward) == ([0.5, 0.0, 1.5], 2.0)
        assert {name for name in rollout.metrics if name.startswith("reward/")} == {"reward/ended"}
        rewritten = await played(environment, ScriptedModel(chat, ["x", "secret", "y"]))
        assert rewritten.turn_rewards is not None
        assert rewritten.turn_rewards.tolist() == [0.0, 0.5, 0.0]
        assert [turn.trained_tokens > 0 for turn in rewritten.turns] == [True, False, True]
        none = await played(environment, ScriptedModel(chat, ["x", "y", "z"]))
        assert (none.turn_rewards, none.reward) == (None, 0.0)


async def test_turns_of_players_add_up_to_each_ones_reward(chat: Chat, running: Running) -> None:
    async with running("stepwise", env={"runs": 2}) as environment:
        rollout = await played(environment, ScriptedModel(chat, ["0", "1", "x", "x", "y", "2"]))
    assert rollout.turn_rewards is not None
    assert [turn.player for turn in rollout.turns] == ["agent"] * 3 + ["agent-2"] * 3
    assert rollout.turn_rewards.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 1.5]
    assert rollout.player_rewards == {"agent": 1.0, "agent-2": 1.5}


async def test_an_answer_that_was_not_given_fails_the_rollout(chat: Chat, running: Running) -> None:
    async with running("stepwise", taskset={"beyond": True}) as environment:
        with pytest.raises(Exception, match=r"reward 'turn/9': agent 'agent' has given 3 answers"):
            await played(environment, ScriptedModel(chat, ["0", "1", "2"]))


def test_an_answer_that_is_no_turn_shifts_no_other_ones_reward() -> None:
    messages = [object() for _ in range(3)]
    turns = [SimpleNamespace() for _ in range(3)]
    trace = SimpleNamespace(
        id="t",
        nodes=[SimpleNamespace(sampled=True, message=each) for each in messages],
        rewards={"turn/1": SimpleNamespace(value=0.5)},
        reward=0.5,
        agent=SimpleNamespace(name="agent"),
    )
    known: Any = SimpleNamespace(
        turns=turns, messages={id(turn): each for turn, each in zip(turns, messages, strict=True)}, steps=[]
    )
    assert [each[1] for each in turn_rewards([trace], {"t": known})] == [0.5, 0.0]
    known.turns.pop(0)
    with pytest.raises(NoSuchTurn, match="answer 0 is no turn of the policy"):
        turn_rewards([trace], {"t": known})
    trace.rewards = {}
    assert turn_rewards([trace], {"t": known}) == []


REWARDS = [0.25, -0.5, None, 1.0]
"""The rewards of the steps of a game."""


class Client:
    """A client with the methods of OpenEnv's that the library calls: the game is over after as many steps as have a reward."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url.replace("http://", "ws://")
        self._steps = 0

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def reset(self, **_: object) -> Any:
        return SimpleNamespace(observation={"step": 0}, reward=None, done=False)

    async def step(self, action: dict[str, Any]) -> Any:
        assert action == {"move": "go"}
        self._steps += 1
        done = self._steps == len(REWARDS)
        return SimpleNamespace(observation={"step": self._steps}, reward=REWARDS[self._steps - 1], done=done)


@pytest.fixture
async def openenv(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The parts of OpenEnv that the library uses, since it is not installed. Yields a server's URL."""

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"title": "Move", "required": ["move"]}})

    package, core = ModuleType("openenv"), ModuleType("openenv.core")
    package.__dict__.update(GenericEnvClient=Client, core=core, __path__=[], __spec__=SimpleNamespace(origin=None))
    core.__dict__["CallToolAction"] = object
    monkeypatch.setitem(sys.modules, "openenv", package)
    monkeypatch.setitem(sys.modules, "openenv.core", core)
    app = web.Application()
    app.add_routes([web.get("/schema", schema)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_step_of_openenv_rewards_the_turn_that_made_it(chat: Chat, running: Running, openenv: str) -> None:
    async with running("", id="openenv", taskset={"base_url": openenv}) as environment:
        for _ in range(2):
            rollout = await played(environment, ScriptedModel(chat, ["go"] * 4))
            assert rollout.turn_rewards is not None
            assert (rollout.turn_rewards.tolist(), rollout.reward) == ([0.25, -0.5, 0.0, 1.0], 0.75)
        assert rollout.metrics["reward/openenv_reward"] == 0.75
