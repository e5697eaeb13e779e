"""The built-in tasks, played by a scripted model through real chat rendering."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.environments.base import Environment
from counterpoint.environments.chat import Chat
from counterpoint.environments.scripted import play
from counterpoint.environments.tasks.arithmetic import Arithmetic
from counterpoint.environments.tasks.closest_number import ClosestNumber
from counterpoint.environments.tasks.guess_number import GuessNumber
from counterpoint.environments.tasks.reverse_text import ReverseText
from counterpoint.environments.tools.hermes import write_hermes

BUILT_IN: list[Environment] = [
    ReverseText(examples=20),
    GuessNumber(),
    ClosestNumber(examples=20),
    Arithmetic(examples=20),
]


@pytest.mark.parametrize("environment", BUILT_IN, ids=lambda environment: type(environment).__name__)
def test_examples_are_the_same_every_time(environment: Environment) -> None:
    again = type(environment)() if isinstance(environment, GuessNumber) else type(environment)(examples=20)  # type: ignore[call-arg]
    for index in range(len(environment)):
        assert environment.example(index) == again.example(index)
        assert environment.example(index).index == index
    with pytest.raises(IndexError):
        environment.example(len(environment))


@pytest.mark.parametrize("environment", BUILT_IN, ids=lambda environment: type(environment).__name__)
async def test_the_state_is_json_and_rewards_are_shares(environment: Environment, chat: Chat) -> None:
    for answers in (["7", "7", "7"], ["", "", ""], ["☂ x", "1", "2"], ["9" * 30, "1", "2"]):
        rollout = await play(environment, 0, chat, *answers)
        json.dumps(rollout.state)
        rewards = (
            await environment.score_group(environment.example(0), [rollout]) if environment.group_scoring else None
        )
        reward = rewards[0] if rewards else rollout.reward
        assert isinstance(reward, float | int)
        assert 0.0 <= reward <= 1.0


@pytest.mark.parametrize("environment", BUILT_IN, ids=lambda environment: type(environment).__name__)
async def test_the_other_way_of_scoring_is_refused(environment: Environment, chat: Chat) -> None:
    rollout = await play(environment, 0, chat, "1", "1", "1")
    example = environment.example(0)
    with pytest.raises(NotImplementedError):
        await (
            environment.score(example, rollout) if environment.group_scoring else environment.score_group(example, [])
        )


async def test_reversed_text_earns_by_the_letter(chat: Chat) -> None:
    environment = ReverseText()
    example = environment.example(3)
    assert (await play(environment, 3, chat, example.answer)).reward == 1.0
    one_wrong = "?" + example.answer[1:]
    assert (await play(environment, 3, chat, one_wrong)).reward == (len(example.answer) - 1) / len(example.answer)
    assert (await play(environment, 3, chat, example.answer * 2)).reward == 0.5
    assert (await play(environment, 3, chat, "")).reward == 0.0


@given(st.integers(0, 999))
def test_words_have_their_length_and_no_letter_twice(index: int) -> None:
    example = ReverseText().example(index)
    assert 3 <= len(example.answer) <= 5
    assert len(set(example.answer)) == len(example.answer)
    assert example.prompt == f"reverse {example.answer[::-1]}"


async def test_halving_always_finds_the_number(chat: Chat) -> None:
    environment = GuessNumber()
    tree = {"4": ("2", "6"), "2": ("1", "3"), "6": ("5", "7")}
    for index in range(len(environment)):
        secret = int(environment.example(index).answer)
        answers = ["4"]
        while answers[-1] in tree and int(answers[-1]) != secret:
            answers.append(tree[answers[-1]][int(answers[-1]) < secret])
        rollout = await play(environment, index, chat, *answers)
        assert rollout.reward == 1.0
        assert rollout.state["guesses"] == [int(answer) for answer in answers]


async def test_the_environment_answers_in_between(chat: Chat) -> None:
    rollout = await play(GuessNumber(largest=9, guesses=3), 4, chat, "1", "9", "2")  # the secret is 5
    last = [*rollout.turns[-1].prompt_ids.tolist(), *rollout.turns[-1].completion_ids.tolist()]
    said = "<|user|>guess 1-9<|end|><|assistant|>1<|end|><|user|>higher<|end|><|assistant|>9<|end|>"
    assert last == chat.encode(f"{said}<|user|>lower<|end|><|assistant|>2<|end|>")
    assert rollout.reward == 0.0


@pytest.mark.parametrize("nonsense", ["", "four", "-1", "0", "8", "4.0", "²", "9" * 5000])
async def test_what_is_no_guess_ends_the_game(chat: Chat, nonsense: str) -> None:
    rollout = await play(GuessNumber(), 0, chat, nonsense)
    assert rollout.reward == 0.0
    assert len(rollout.turns) == 1


async def test_the_closest_of_a_group_earns_most(chat: Chat) -> None:
    environment = ClosestNumber()
    sum_ = int(environment.example(0).answer)
    answers = [str(sum_), str(sum_ + 1), str(sum_ + 5), "no idea", str(sum_ + 1)]
    rollouts = [await play(environment, 0, chat, answer) for answer in answers]
    rewards = await environment.score_group(environment.example(0), rollouts)
    assert rewards == [1.0, 0.75, 0.25, 0.0, 0.75]


async def test_one_alone_in_its_group_earns_by_being_a_number(chat: Chat) -> None:
    environment = ClosestNumber()
    good, bad = [await play(environment, 0, chat, answer) for answer in ("3", "x")]
    assert await environment.score_group(environment.example(0), [good]) == [1.0]
    assert await environment.score_group(environment.example(0), [bad]) == [0.0]


@pytest.mark.parametrize(
    "arguments", [{"examples": 0}, {"shortest": 0}, {"shortest": 4, "longest": 3}, {"longest": 27}]
)
def test_impossible_words_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ReverseText(**arguments)


@pytest.mark.parametrize("arguments", [{"largest": 1}, {"guesses": 0}])
def test_impossible_games_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 2 and 1"):
        GuessNumber(**arguments)


async def test_the_calculator_answers_and_the_answer_counts(chat: Chat) -> None:
    environment = Arithmetic(examples=5)
    for index in range(5):
        example = environment.example(index)
        call = write_hermes("calculator", {"expression": example.prompt.removesuffix("=?")})
        rollout = await play(environment, index, chat, call, example.answer)
        assert rollout.reward == 1.0
        assert (
            f"<tool_response>{example.answer}</tool_response>"
            in chat.transcribe([rollout.turns[1].prompt_ids.tolist()])[0]
        )
        assert rollout.metrics["tools/calls"] == 1.0
        assert (await play(environment, index, chat, example.answer)).reward == 1.0
        assert (await play(environment, index, chat, call, "12345")).reward == 0.0
        assert (await play(environment, index, chat, call, call, call)).reward == 0.0
