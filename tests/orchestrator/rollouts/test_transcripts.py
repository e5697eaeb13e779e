"""Rollouts as text: every token once and in order, the middle left out where there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.environments.chat import Chat
from counterpoint.orchestrator.rollouts.transcripts import Transcriber, TurnText
from counterpoint.orchestrator.step.records import write_records
from counterpoint.transport.records import Turn
from tests.orchestrator.toy_model import make_toy_model
from tests.support.rollouts import make_rollout, make_turn

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(make_toy_model(tmp_path_factory.mktemp("model")))


def answered(chat: Chat, prompt: Sequence[int], answer: str) -> Turn:
    return make_turn(list(prompt), [*chat.encode(answer), *chat.stop_token_ids])


def test_a_prompt_is_what_is_new_since_the_turn_it_extends(chat: Chat) -> None:
    first = answered(chat, chat.start(USER), "naïve ☂")
    second = answered(chat, chat.extend(first, [{"role": "user", "content": "more"}]), "yes")
    other = answered(chat, chat.start([{"role": "user", "content": "else"}]), "no")
    third = answered(chat, chat.extend(second, [{"role": "tool", "content": "42"}]), "")
    assert Transcriber(chat.transcribe, 1000)(make_rollout(turns=[first, second, other, third])) == [
        TurnText("<s>user\nhello</s>\n<s>assistant\n", "naïve ☂</s>"),
        TurnText("\n<s>user\nmore</s>\n<s>assistant\n", "yes</s>"),
        TurnText("<s>user\nelse</s>\n<s>assistant\n", "no</s>"),
        TurnText("\n<s>tool\n42</s>\n<s>assistant\n", "</s>"),
    ]


@given(budget=st.integers(1, 60), lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=4))
def test_a_long_rollout_keeps_its_beginning_and_its_end(budget: int, lengths: list[tuple[int, int]]) -> None:
    """Tokens are numbered in the order they came; what is decoded are the first and the last of them, each once."""
    turns: list[Turn] = []
    decoded: list[int] = []
    tokens = 0
    for prompt, completion in lengths:
        turns.append(
            make_turn(list(range(tokens + prompt)), list(range(tokens + prompt, tokens + prompt + completion)))
        )
        tokens += prompt + completion

    def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
        decoded.extend(token for ids in sequences for token in ids)
        return ["".join(f"{token} " for token in ids) for ids in sequences]

    texts = Transcriber(decode, budget)(make_rollout(turns=turns))
    everything = list(range(tokens))
    half = budget // 2
    kept = everything if tokens <= budget else everything[: budget - half] + everything[tokens - half :]
    assert decoded == kept
    said = "".join(text.prompt + text.completion for text in texts)
    left_out = [int(words.split()[0]) for words in said.split("[... ")[1:]]
    assert sum(left_out) == tokens - len(kept)


def test_a_rollout_that_failed_for_its_tokens_is_recorded_with_the_others(chat: Chat, tmp_path: Path) -> None:
    broken = make_rollout(turns=[make_turn([-1, *chat.encode("a")], [2**31 - 1])], error="token -1", reward=None)
    whole = make_rollout(turns=[answered(chat, chat.start(USER), "hi")])
    path = tmp_path / "rollouts.jsonl"
    write_records(path, [broken, whole], {"toy": []}, Transcriber(chat.transcribe, 100))
    one, two = (orjson.loads(line) for line in path.read_bytes().splitlines())
    assert (one["turns"][0]["prompt"], one["turns"][0]["completion"]) == ("a", "")
    assert two["turns"][0]["completion"] == "hi</s>"


def test_without_a_transcriber_the_turns_have_no_text(tmp_path: Path) -> None:
    write_records(tmp_path / "rollouts.jsonl", [make_rollout()], {"toy": []})
    (turn,) = orjson.loads((tmp_path / "rollouts.jsonl").read_bytes())["turns"]
    assert (turn["prompt"], turn["completion"], turn["completion_tokens"]) == (None, None, 2)


def test_prompts_are_compared_in_place() -> None:
    """A view that is not contiguous is as good as any."""
    tokens = np.arange(12, dtype=np.int32)[::2]
    first = make_turn([0, 2], [4])
    second = Turn(tokens, tokens[:0], np.zeros(0, np.float32), 0, "stop")
    seen: list[Sequence[Sequence[int]]] = []

    def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
        seen.append(sequences)
        return [""] * len(sequences)

    Transcriber(decode, 100)(make_rollout(turns=[first, second]))
    assert seen == [[[0, 2], [], [4], [], [6, 8, 10], [], [], []]]
