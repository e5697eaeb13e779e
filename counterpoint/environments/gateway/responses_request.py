"""Reads requests of OpenAI's Responses API as chat requests, so that both share one history, one check and one way to tokens.

Consecutive items of an assistant (reasoning, message, calls) are one message of a chat: what `responses_answer` writes for one
turn comes back as that turn's message, and continues its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from counterpoint.environments.gateway.fields import check_names, count_of, list_of, refuse, table_of, text_of
from counterpoint.environments.sampling import SHAPING

LOG_PROBABILITIES = "message.output_text.logprobs"
_INCLUDED = (LOG_PROBABILITIES, "reasoning.encrypted_content")
_SAME = frozenset(
    {
        "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "stream", "top_logprobs", "user",
    }
) | frozenset(SHAPING)  # fmt: skip
"""Fields that mean what they mean in a chat request."""
_READ = frozenset(
    {
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "reasoning",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
    }
)
_IGNORED = frozenset({"access_programs", "background_options", "client_metadata", "image", "max_tool_calls"})
"""Parameters that describe the client, or are about hosted tools, images or work in the background, which are refused."""
_LEFT_OUT = frozenset({"web_search"})
"""Tools that the provider runs, and that agents offer beside their own without being asked: the model is not offered them."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "context_management": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
_ADVICE = {
    "conversation": "answers are not kept by id here; send the whole conversation as input",
    "previous_response_id": "answers are not kept by id here; send the whole conversation as input",
}
PLACES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
WORDS = {".function": "", ".tool_call_id": ".call_id"}
"""What `fields.named_as` takes for these requests, beside the places of their items."""
_TEXTS = ("input_text", "output_text", "text")
_RUN = "only tools of type function, alone or in a namespace, are served: the agent runs them"

_logger = logging.getLogger(__name__)


def chat_fields(fields: dict[str, Any], places: dict[str, str] | None = None) -> dict[str, Any]:
    """Returns the fields of the chat request that asks for the same. Raises `GatewayRefused`, which names the field at fault.

    `places` gets where each message of the chat request, and each call, stands.
    """
    check_names(fields, _SAME | _READ | _IGNORED, _NEUTRAL, _ADVICE)
    made = {name: value for name, value in fields.items() if name in _SAME}
    made["messages"] = _messages(fields.get("instructions"), fields.get("input"), {} if places is None else places)
    made["tools"] = _tools(fields.get("tools"), {} if places is None else places)
    made["max_tokens"] = count_of("max_output_tokens", fields.get("max_output_tokens"))
    made["tool_choice"] = _tool_choice(fields.get("tool_choice"))
    reasoning = table_of(
        "reasoning", fields.get("reasoning"), {"effort", "summary", "generate_summary", "context", "mode"}
    )
    for key, only in (("context", "auto"), ("mode", "standard")):
        if reasoning.get(key) not in (None, only):
            refuse(f"reasoning.{key}", reasoning[key], f"only {only!r} is served")
    made["reasoning_effort"] = reasoning.get("effort")
    text = table_of("text", fields.get("text"), {"format", "verbosity"})
    made["verbosity"] = text.get("verbosity")
    made["response_format"] = _response_format(text.get("format"))
    table_of("stream_options", fields.get("stream_options"), {"include_obfuscation"})
    include = fields.get("include") or []
    if not isinstance(include, list) or not all(each in _INCLUDED for each in include):
        refuse("include", include, f"expected a list of {', '.join(_INCLUDED)}")
    made["logprobs"] = LOG_PROBABILITIES in include or bool(fields.get("top_logprobs"))
    return {name: value for name, value in made.items() if value is not None}


def _messages(instructions: object, given: object, places: dict[str, str]) -> list[dict[str, Any]]:
    if instructions is not None and not isinstance(instructions, str):
        refuse("instructions", instructions, "expected text")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for where, item in list_of("input", given, "expected text, or a list of items"):
        _add(messages, item, where)
        if messages:
            at = f"messages[{len(messages) - 1}]"
            places.setdefault(at, where)
            places[f"{at}.tool_calls[{len(messages[-1].get('tool_calls', ())) - 1}]"] = where
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Adds an item, to the assistant's message in progress if it is part of it."""
    kind = item.get("type") or "message"
    if kind == "message":
        role, content = item.get("role"), text_of(f"{where}.content", item.get("content"), _TEXTS)
        if role == "assistant":
            _assistant(messages, "content")["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        name, namespace = item.get("name"), item.get("namespace")
        name = name if namespace is None else _flat(_name({"name": namespace}, where), _name(item, where))
        call = {"name": name, "arguments": item.get("arguments")}
        calls = _assistant(messages, "").setdefault("tool_calls", [])
        calls.append({"id": item.get("call_id"), "type": "function", "function": call})
    elif kind == "function_call_output":
        content = text_of(f"{where}.output", item.get("output"), _TEXTS)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "reasoning":
        # Reasoning begins a message. A summary is not what was reasoned; without the text the turn's own tokens have it.
        if content := text_of(f"{where}.content", item.get("content"), ("reasoning_text",)):
            _assistant(messages, "reasoning_content")["reasoning_content"] = content
    else:
        advice = "; Codex sends it for a model that it knows: name another, as with -m policy"
        expected = "expected message, function_call, function_call_output or reasoning"
        refuse(f"{where}.type", kind, expected + (advice if kind == "additional_tools" else ""))


def _assistant(messages: list[dict[str, Any]], field: str) -> dict[str, Any]:
    """The assistant's message that an item with `field` belongs to: the last one, unless it has that field or a later one."""
    order = ["reasoning_content", "content", "tool_calls"]
    last = messages[-1] if messages else {}
    taken = order[order.index(field) :] if field else []
    if last.get("role") != "assistant" or any(each in last for each in taken):
        messages.append({"role": "assistant"})
    return messages[-1]


def namespaced(tools: object) -> dict[str, tuple[str, str]]:
    """Returns the namespace and the name of each function that is in one, by the name that the model reads.

    `tools` are those of a request that was read.
    """
    spaces = [tool for tool in tools or () if tool["type"] == "namespace"] if isinstance(tools, list) else []
    return {
        _flat(each["name"], tool["name"]): (each["name"], tool["name"]) for each in spaces for tool in each["tools"]
    }


def _flat(namespace: str, name: str) -> str:
    """The name of a function as vLLM shows it to the model."""
    return f"{namespace}__{name}"


def _tools(tools: object, places: dict[str, str]) -> object:
    if not tools:
        return tools
    if not isinstance(tools, list):
        refuse("tools", tools, "expected a list of tools")
    made: list[dict[str, Any]] = []
    for where, tool in _functions(tools):
        places[f"tools[{len(made)}]"] = where
        made.append({"type": "function", "function": {key: tool[key] for key in tool if key != "type"}})
    if not made:
        refuse("tools[0]", tools[0]["type"], f"{_RUN}; the provider of the model runs this one")
    return made


def _functions(tools: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions among the tools, each with its place."""
    for index, tool in enumerate(tools):
        where, kind = f"tools[{index}]", tool.get("type") if isinstance(tool, dict) else tool
        if kind == "function":
            yield where, tool
        elif kind == "namespace":
            for at, each in list_of(f"{where}.tools", tool.get("tools"), "expected a list of functions"):
                if each.get("type") != "function":
                    refuse(f"{at}.type", each.get("type"), _RUN)
                yield at, each | {"name": _flat(_name(tool, where), _name(each, at))}
        elif isinstance(kind, str) and kind in _LEFT_OUT:
            _note_left_out(kind)
        else:
            refuse(where, kind, _RUN)


def _name(tool: dict[str, Any], where: str) -> str:
    if not isinstance(name := tool.get("name"), str) or not name:
        refuse(f"{where}.name", name, "expected a name")
    return name


@cache
def _note_left_out(kind: str) -> None:
    """Logs it once: an agent offers its tools with every request."""
    _logger.warning(
        "an agent offers the tool %r, which the provider of a model runs: its policy is not offered it", kind
    )


def _tool_choice(value: object) -> object:
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def _response_format(value: object) -> object:
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: value[key] for key in value if key != "type"}}
    return value
