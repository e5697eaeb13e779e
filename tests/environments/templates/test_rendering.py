"""Our rendering against transformers' own, for every chat template at hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.chat import Chat
from tests.environments.templates.at_hand import TEMPLATES, model_directory

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": 'Looks <there> & "here".',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Wö"},
                    "far": {"type": ["number", "null"], "enum": [1, 2.5, None]},
                    "ways": {"type": "array", "items": {"type": "object", "properties": {"way": {"type": "boolean"}}}},
                },
                "required": ["place"],
            },
        },
    }
]
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "look", "arguments": {"place": 'a <b> "c" é', "far": 2.5, "ways": [{"way": True}]}},
        }
    ],
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Hello, <you> & ö\n"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "hm"},
        {"role": "user", "content": "three"},
    ],
    [
        {"role": "user", "content": "look"},
        CALL,
        {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "seen"},
        {"role": "assistant", "content": "done"},
    ],
    [{"role": "assistant", "content": "first"}, {"role": "user", "content": "second"}],
]

# What no template at hand needs and transformers gives to each.
FEATURES = """\
{%- generation %}{% set x = 'inner' %}{{ messages[0].content | tojson(separators=(',', ':')) }}{% endgeneration %}
{{- x | default('outer') }}{{ [1, {'a': 'ö<'}] | tojson(True, 1, (', ', ': ')) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}
{%- for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}
{{- bos_token | default('none') }}{{ eos_token }}{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}
"""


def compare(directory: Path) -> int:
    """Compares all conversations; returns how many were rendered, and not refused by both."""
    from transformers import AutoTokenizer

    ours, theirs, rendered = Chat(directory), AutoTokenizer.from_pretrained(directory), 0
    reads_tools = "tools" in ours._templates.of(TOOLS).variables
    for messages in CONVERSATIONS:
        for tools in ([], TOOLS) if reads_tools else ([],):
            for prompt in (False, True):
                try:
                    expected: Any = theirs.apply_chat_template(
                        messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt
                    )
                except Exception as error:  # noqa: BLE001 - a template may fail in any way
                    with pytest.raises(ValueError, match=re.escape(str(error))):
                        ours.render(messages, tools, add_generation_prompt=prompt)
                    continue
                assert ours.render(messages, tools, add_generation_prompt=prompt) == expected
                rendered += 1
    return rendered


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_is_rendered_as_transformers_does(name: str, tmp_path: Path) -> None:
    assert compare(model_directory(tmp_path, name)) >= 2


@pytest.mark.slow
def test_what_transformers_gives_to_every_template_is_there(tmp_path: Path) -> None:
    (model_directory(tmp_path, next(iter(TEMPLATES))) / "chat_template.jinja").write_text(FEATURES)
    assert compare(tmp_path) == 2 * 2 * len(CONVERSATIONS)


def test_there_are_templates_at_hand() -> None:
    assert len(TEMPLATES) > 60
