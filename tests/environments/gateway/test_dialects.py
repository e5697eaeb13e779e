"""One conversation has the same tokens in each dialect: those of transformers' own `apply_chat_template`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway import anthropic_request, responses_request
from counterpoint.environments.gateway.conversation import Histories
from counterpoint.environments.gateway.messages import template_messages, template_tools

Fields = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}


def conversation(choose: random.Random) -> list[Fields]:
    """The messages of a chat with parallel calls, their results, and reasoning; the last is the user's."""

    def words() -> str:
        return "".join(choose.choices('ab <|\n"{é', k=choose.randint(1, 8)))

    messages: list[Fields] = [{"role": "system", "content": words()}]
    for turn in range(choose.randint(1, 4)):
        messages.append({"role": "user", "content": words()})
        message: Fields = {"role": "assistant", "content": ""}
        calls = [
            {"id": f"call_{turn}_{index}", "type": "function",
             "function": {"name": "look", "arguments": json.dumps({"at": words(), "n": choose.randint(0, 2**70)})}}
            for index in range(choose.randint(0, 3))
        ]  # fmt: skip
        if choose.random() < 0.3:
            message["reasoning_content"] = words()
        if not calls or choose.random() < 0.5:
            message["content"] = words()
        if calls:
            message["tool_calls"] = calls
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": words()} for call in calls]
    return [*messages, {"role": "user", "content": words()}]


def as_chat(messages: list[Fields], chat: Chat) -> Fields:
    return {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}


def as_responses(messages: list[Fields], chat: Chat) -> Fields:
    items: list[Fields] = []
    for message in messages[1:]:
        match message["role"]:
            case "user":
                items.append({"role": "user", "content": message["content"]})
            case "tool":
                output = {"call_id": message["tool_call_id"], "output": message["content"]}
                items.append({"type": "function_call_output", **output})
            case _:
                if "reasoning_content" in message:
                    content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
                    items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
                if message["content"]:
                    items.append({"role": "assistant", "content": message["content"]})
                items += [
                    {"type": "function_call", "call_id": call["id"], **call["function"]}
                    for call in message.get("tool_calls", ())
                ]
    given = {"instructions": messages[0]["content"], "input": items, "tools": [{"type": "function", **FUNCTION}]}
    return responses_request.chat_fields(given)


def as_anthropic(messages: list[Fields], chat: Chat) -> Fields:
    given: list[Fields] = []
    for message in messages[1:]:
        blocks: list[Fields] = []
        if message["role"] == "tool":
            blocks.append(
                {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            )
            if given[-1]["role"] == "user":  # all results of a message come in one
                given[-1]["content"] += blocks
                continue
        if "reasoning_content" in message:
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "x"})
        if message["role"] != "tool" and message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            values = json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": "look", "input": values})
        role = "user" if message["role"] == "tool" else message["role"]
        is_plain = [block["type"] for block in blocks] == ["text"] and len(given) % 4 == 0
        given.append({"role": role, "content": message["content"] if is_plain else blocks})
    tool = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
    return anthropic_request.chat_fields({"system": messages[0]["content"], "messages": given, "tools": [tool]}, chat)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", [as_chat, as_responses, as_anthropic])
def test_500_random_conversations_have_the_tokens_that_transformers_gives_them(
    chat: Chat, tokenizer_directory: Path, dialect: Callable[[list[Fields], Chat], Fields]
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_directory)
    for seed in range(500):
        messages = conversation(random.Random(seed))
        fields = dialect(messages, chat)
        prompt = Histories(chat).prompt(template_messages(fields["messages"]), template_tools(fields["tools"]))
        expected = theirs.apply_chat_template(
            template_messages(messages),
            tools=[{"type": "function", "function": FUNCTION}],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert prompt.tolist() == expected, seed
