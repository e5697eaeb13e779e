"""A recorded prompt as a conversation: the usual templates, and nothing lost of what no template begins."""

from __future__ import annotations

import pytest

from counterpoint.job.inspection.conversation import messages_of, without_end

TEMPLATES = {
    "ChatML": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n",
    "Llama": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nTwo and two?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "ours": "<|system|>Be brief.<|end|><|user|>Two and two?<|end|><|assistant|>",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_messages_have_their_roles_and_no_tokens_of_the_template(template: str) -> None:
    assert messages_of(TEMPLATES[template]) == [("system", "Be brief."), ("user", "Two and two?")]


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("<s>[INST] Two and two? [/INST]", [("user", " Two and two? ")]),
        ("<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", [("user", "Hi")]),
        ("<\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c>", [("user", "Hi")]),
        ("<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n", [("user", "And then?")]),
        ("<|user|><tool_response>7</tool_response><|end|><|assistant|>", [("tool", "7")]),
        ("<|im_start|>assistant\n<think>\n", [("assistant", "<think>")]),
        ("just text", [("", "just text")]),
        ("before <|user|>x", [("", "before "), ("user", "x")]),
        ("", []),
    ],
)
def test_other_templates_and_what_none_begins(prompt: str, messages: list[tuple[str, str]]) -> None:
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


def test_a_hostile_text_takes_no_long_time() -> None:
    for text in ("<|im_start|>" + " " * 10**6, "<|end|>" * 10**5 + "x", "[INST]" * 10**5, " " * 10**6):
        messages_of(text)
        without_end(text)
