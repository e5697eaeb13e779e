"""Rewards that an agent gives its turns, over real sockets: which turn gets one, and what is refused and fails the rollout."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway import Gateway, Session
from counterpoint.environments.gateway.session import RewardRefused
from counterpoint.environments.scripted import ScriptedModel

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway(turn_rewards=True)
    yield gateway
    await gateway.close()


async def post(session: Session, path: str, body: Any, key: str | None = None) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key or session.api_key}"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{session.base_url}/{path}", data=content) as answer,
    ):
        return answer.status, await answer.json()


async def ask(session: Session, **fields: Any) -> dict[str, Any]:
    status, answer = await post(session, "chat/completions", {"model": "any", "messages": HELLO} | fields)
    assert status == 200, answer
    return answer


def rewards_of(model: ScriptedModel) -> list[float] | None:
    given = model.turn_rewards.array()
    return None if given is None else given.tolist()


@asynccontextmanager
async def failing(gateway: Gateway, model: ScriptedModel, why: str) -> AsyncIterator[Session]:
    """A session at whose end the rollout fails for a reward."""
    said = "nothing was refused"
    try:
        async with gateway.session(model) as session:
            yield session
    except RewardRefused as error:
        said = str(error)
    assert said.startswith("the agent sent a reward that cannot be taken: ")
    assert why in said


async def test_a_turn_is_named_by_its_number_its_answers_id_or_not_at_all(gateway: Gateway, chat: Chat) -> None:
    model = ScriptedModel(chat, ["one", "two", "three", "four", "five", "six"])
    async with gateway.session(model) as session:
        first = await ask(session)
        await ask(session)
        assert await post(session, "reward", {"reward": 1}) == (200, {"turn": 1, "reward": 1.0})
        await ask(session, n=2)
        assert await post(session, "reward", {"turn": 3, "reward": -0.25}) == (200, {"turn": 3, "reward": -0.25})
        assert await post(session, "reward", {"turn": first["id"], "reward": 0.5}) == (200, {"turn": 0, "reward": 0.5})
        _, said = await post(session, "responses", {"model": "any", "input": "hello"})
        _, answered = await post(session, "messages", {"model": "any", "max_tokens": 5, "messages": HELLO})
        for answer in (said, answered):
            assert (
                await post(
                    session,
                    "reward",
                    {
                        "turn": answer["id"],
                        "reward": 2.0,
                    },
                )
            )[0] == 200
    assert session.has_rewards
    assert rewards_of(model) == [0.5, 1.0, 0.0, -0.25, 2.0, 2.0]


async def test_choices_of_one_answer_are_turns_in_their_order(gateway: Gateway, chat: Chat) -> None:
    model = ScriptedModel(chat, ["a", "b", "c"])
    async with gateway.session(model) as session:
        answer = await ask(session, n=3)
        said = [choice["message"]["content"] for choice in answer["choices"]]
        for number, text in enumerate(said):
            await post(session, "reward", {"turn": number, "reward": ord(text)})
    given = model.turn_rewards.array()
    assert given is not None
    assert given.tolist() == [ord(chat.decode(turn.completion_ids.tolist())) for turn in model.turns]


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"turn": 1, "reward": 1.0}, 400, "turn is 1; expected a number below 1"),
        ({"turn": -1, "reward": 1.0}, 400, "turn is -1"),
        ({"turn": True, "reward": 1.0}, 400, "turn is True"),
        ({"turn": 0.0, "reward": 1.0}, 400, "turn is 0.0"),
        ({"turn": "chatcmpl-0", "reward": 1.0}, 400, "turn is 'chatcmpl-0'"),
        ({"turn": 10**30, "reward": 1.0}, 400, "turn is 1000"),
        ({"turn": 0}, 400, "reward is None"),
        ({"turn": 0, "reward": "1"}, 400, "reward is '1'"),
        ({"turn": 0, "reward": True}, 400, "reward is True"),
        ({"turn": 0, "reward": [1]}, 400, "reward is a list"),
        ({"turn": 0, "reward": 1e39}, 400, "expected a finite number"),
        (b'{"turn": 0, "reward": 1' + b"0" * 400 + b"}", 400, "expected a finite number"),
        ({"turn": 0, "reward": 1.0, "player": "x"}, 400, "player"),
    ],
)
async def test_what_is_no_reward_is_refused_and_fails_the_rollout(
    gateway: Gateway, chat: Chat, body: Any, status: int, why: str
) -> None:
    model = ScriptedModel(chat, ["one"])
    async with failing(gateway, model, why) as session:
        await ask(session)
        code, answer = await post(session, "reward", body)
        assert (code, why in answer["error"]["message"]) == (status, True), answer
        assert len(session.errors) == 1
        assert (await post(session, "reward", {"reward": 1.0}))[0] == 200, "what is right is taken all the same"
    assert rewards_of(model) == [1.0]


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999", b"1" + b"0" * 5000])
async def test_a_body_that_is_no_json_of_ours_changes_nothing(gateway: Gateway, chat: Chat, number: bytes) -> None:
    model = ScriptedModel(chat, ["one"])
    async with failing(gateway, model, "") as session:
        await ask(session)
        status, _ = await post(session, "reward", b'{"reward": ' + number + b"}")
        assert status == 400
    assert rewards_of(model) is None


async def test_a_second_reward_and_one_before_the_first_turn_fail_the_rollout(gateway: Gateway, chat: Chat) -> None:
    async with failing(gateway, ScriptedModel(chat, []), "turn is None") as session:
        assert (await post(session, "reward", {"reward": 1.0}))[0] == 400
    model = ScriptedModel(chat, ["one"])
    async with failing(gateway, model, "turn 0 has the reward 1 already") as session:
        await ask(session)
        assert [(await post(session, "reward", {"reward": 1.0}))[0] for _ in range(2)] == [200, 400]
    assert rewards_of(model) == [1.0]


async def test_nobody_elses_key_and_no_key_after_the_end_gives_a_reward(gateway: Gateway, chat: Chat) -> None:
    model, other = ScriptedModel(chat, ["one"]), ScriptedModel(chat, ["one"])
    async with gateway.session(other) as theirs:
        await ask(theirs)
        async with gateway.session(model) as session:
            await ask(session)
            for key in (theirs.api_key, "cp-nobody"):
                assert (await post(session, "reward", {"reward": 1.0}, key))[0] == 401
            assert (await post(session, "reward", {"reward": "1"}, "cp-nobody"))[0] == 401
        assert (await post(session, "reward", {"reward": 1.0}))[0] == 410
    assert rewards_of(model) is rewards_of(other) is None


async def test_without_leave_an_agent_gives_no_rewards_and_the_rollout_goes_on(chat: Chat) -> None:
    gateway, model = Gateway(), ScriptedModel(chat, ["one"])
    try:
        async with gateway.session(model) as session:
            await ask(session)
            status, answer = await post(session, "reward", {"reward": 1.0})
            assert (status, "args.turn_rewards" in answer["error"]["message"]) == (403, True)
        assert session.errors
        assert rewards_of(model) is None
    finally:
        await gateway.close()
