"""Where a model's reasoning ends in its text, by the marks of each family."""

from __future__ import annotations

import pytest

from counterpoint.environments.rewards.reasoning import after_reasoning

MARKS = {
    "<think>": "</think>",
    "<THINKING>": "</THINKING>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<scratchpad>": "</scratchpad>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<ifm|think_fast>": "</ifm|think_fast>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel>thought\n": "<channel|>",
    "<|channel|>analysis<|message|>": "<|start|>assistant<|channel|>final<|message|>",
    "analysisWell, ": "assistantfinal",
    "<|plamo:begin_think:plamo|>": "<|plamo:end_think:plamo|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "<|content_thinking|>": "<|content_text|>",
    "Here is my thought process: ": "Here's my response:",
}


@pytest.mark.parametrize(("opens", "ends"), MARKS.items())
def test_what_stands_behind_reasoning(opens: str, ends: str) -> None:
    assert after_reasoning(f"{opens}it may be 3{ends}it is 9").removeprefix("<|message|>") == "it is 9"
    assert (
        after_reasoning(f"it may be 3{ends}it is 9").removeprefix("<|message|>") == "it is 9"
    )  # the prompt had opened it
    assert after_reasoning(f"{opens}it may be 3") == ""
    assert after_reasoning(f"{opens}1{ends}{opens}2{ends}it is 9").removeprefix("<|message|>") == "it is 9"


def test_what_is_no_mark() -> None:
    for text in (
        "it is 9",
        "`<think>` is missing, it is 9",
        'no "</think>" there, it is 9',
        "<thing>3</thing>",
        "a < thinks > b",
    ):
        assert after_reasoning(text) == text
    assert after_reasoning("it is 9<think>or is it") == "it is 9"
    assert after_reasoning("it is 9<think>or is it", opened_only_at_start=True) == "it is 9<think>or is it"
