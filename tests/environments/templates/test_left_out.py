"""Under every template at hand, what an answer says is trained, or somebody is told that it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.demonstrations import demonstrations_of
from tests.environments.templates.at_hand import TEMPLATES, model_directory

ASKED: dict[str, Any] = {"role": "user", "content": "What is 20 + 21?"}
REASONING = "twenty and twenty-one"
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"numbers": [20, 21]}}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "a field": [ASKED, {"role": "assistant", "content": "41", "reasoning_content": REASONING}],
    "a field before a call": [
        ASKED,
        {"role": "assistant", "content": "Let me see.", "reasoning_content": REASONING, "tool_calls": [CALL]},
    ],
    "in the text": [ASKED, {"role": "assistant", "content": f"<think>\n{REASONING}\n</think>\n\n41"}],
}


@pytest.mark.slow  # for each template a tokenizer
@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_is_trained_or_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Chat(model_directory(tmp_path / "model", name))
    for where, row in ROWS.items():
        caplog.clear()
        chat = own.with_template_kwargs({})  # which has named nothing yet
        try:
            found = demonstrations_of(chat, row)
        except ValueError:
            continue  # it is refused
        trained = chat.transcribe(
            [[token for token, own in zip(each.token_ids, each.trained, strict=True) if own] for each in found]
        )
        said = any("reasoning_content" in line or "'content'" in line for line in caplog.messages)
        assert said != any(REASONING in text for text in trained), where
