"""A recorded prompt as a conversation: the usual templates, and nothing lost of what no template begins."""

from __future__ import annotations

import pytest

from counterpoint.job.reading.rollouts.conversation import messages_of, without_end
from tests.support.conversations import PROMPTS, hostile
from tests.support.growth import assert_growth


@pytest.mark.parametrize(("prompt", "messages"), PROMPTS)
def test_the_messages_of_the_usual_templates_and_what_none_begins(prompt: str, messages: list[tuple[str, str]]) -> None:
    assert messages_of(prompt) == messages


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        ("four<|im_end|>", "four"),
        ("four</s>\n", "four"),
        ("four <|end|><|endoftext|>", "four"),
        ("<|end|> of", "<|end|> of"),
    ],
)
def test_a_completion_ends_without_its_token(completion: str, said: str) -> None:
    assert without_end(completion) == said


@pytest.mark.parametrize("which", range(len(hostile(0))))
def test_a_hostile_text_is_read_in_time_that_grows_with_its_length(which: int) -> None:
    assert_growth(lambda size: hostile(size)[which], lambda text: (messages_of(text), without_end(text)), 20)
