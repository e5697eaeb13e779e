"""Reads requests of Anthropic's Messages API as chat requests, so that both share one history, one check and one way to tokens.

Its blocks become messages of a chat: those of an assistant one message, each result of a tool one, and text between them another.
What `anthropic_answer` writes for one turn comes back as that turn's message, and continues its tokens.
"""

from __future__ import annotations

from typing import Any

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.fields import check_names, count_of, list_of, refuse, table_of, text_of
from counterpoint.environments.messages import shown
from counterpoint.environments.sampling import SHAPING
from counterpoint.transport.exact_json import dumps

_SAME = frozenset({"stream"}) | frozenset(SHAPING)
"""Fields that mean what they mean in a chat request."""
_READ = frozenset(
    {"max_tokens", "messages", "output_config", "stop_sequences", "system", "thinking", "tool_choice", "tools"}
)
_IGNORED = frozenset(
    {
        "billing_policy", "cache_control", "context_management", "diagnostics", "fallback_credit_token", "fallbacks",
        "inference_geo", "metadata", "model", "service_tier", "speed", "user_profile_id", "workspace_id",
    }
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {"compaction": (), "container": (), "mcp_servers": ([],), "thread": ()}
_ADVICE = {
    "compaction": "nothing is summarised here; let the agent do it",
    "container": "no code is run here; give the model a tool of yours",
    "mcp_servers": "the agent calls its servers itself; give the model their tools",
}
_TEXT = ("text",)
_PARTS = ("reasoning_content", "content", "tool_calls")
"""The parts of a chat's message, in the order in which the policy writes them."""
PLACES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}
WORDS = {".function": "", ".parameters": ".input_schema", ".reasoning_content": ".content"}
"""What `fields.named_as` takes for these requests, beside the places of their messages."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(fields: dict[str, Any], chat: Chat, places: dict[str, str] | None = None) -> dict[str, Any]:
    """Returns the fields of the chat request that asks for the same. Raises `GatewayRefused`, which names the field at fault.

    `chat` has the model's template: an effort, and thinking that is turned off, count where it reads them. `places` gets where
    each message of the chat request stands.
    """
    if (thread := fields.get("thread")) is not None:
        # By this code Anthropic's `tool_runner`, which asks for a thread by itself, goes on without one.
        message = f"thread is {shown(thread)}; no history is kept here: send the whole one, with thread=False"
        raise GatewayRefused(message, parameter="thread", code="thread_unsupported_request")
    check_names(fields, _SAME | _READ | _IGNORED, _NEUTRAL, _ADVICE)
    made = {name: value for name, value in fields.items() if name in _SAME}
    made["tools"] = tools = _tools(fields.get("tools"))
    given = fields.get("messages")
    definitions = {name: tool for tool in tools or () if isinstance(name := tool["function"].get("name"), str)}
    made["messages"] = _messages(fields.get("system"), given, definitions, {} if places is None else places)
    made["max_tokens"] = count_of("max_tokens", fields.get("max_tokens"))
    made["stop"] = fields.get("stop_sequences")
    choice = table_of("tool_choice", fields.get("tool_choice"), {"type", "name", "disable_parallel_tool_use"})
    made["tool_choice"] = _tool_choice(choice, tools)
    one_call = choice.get("disable_parallel_tool_use")
    if not isinstance(one_call, bool | None):
        refuse("tool_choice.disable_parallel_tool_use", one_call, "expected true or false")
    if one_call:
        made["parallel_tool_calls"] = False
    output = table_of("output_config", fields.get("output_config"), {"effort", "format"})
    made["response_format"] = _response_format(output.get("format"))
    made["reasoning_effort"] = _effort(output.get("effort"), fields.get("thinking"), chat)
    return {name: value for name, value in made.items() if value is not None}


def deferred_tools(fields: dict[str, Any]) -> set[str]:
    """Returns the tools that the prompt has where a result refers to them, and nowhere else. The `fields` were read before."""
    return {tool["name"] for tool in fields.get("tools") or () if tool.get("defer_loading") is True}


def _messages(
    system: object, given: object, definitions: dict[str, Any], places: dict[str, str]
) -> list[dict[str, Any]]:
    instructions = text_of("system", system, _TEXT)
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for where, message in list_of("messages", given, "expected a list of at least one message"):
        role, content, before = message.get("role"), message.get("content"), len(messages)
        if role not in ("user", "assistant", "system"):
            refuse(f"{where}.role", role, "expected user, assistant or system")
        if role == "system" or not isinstance(content, list):
            messages.append({"role": role, "content": text_of(f"{where}.content", content, _TEXT)})
        elif role == "assistant":
            messages.append({"role": role})
            for at, block in list_of(f"{where}.content", content, "") if content else []:
                _add_to_assistant(messages, block, at)
        else:
            blocks = list_of(f"{where}.content", content, "expected text, or at least one block")
            messages += _of_user(blocks, definitions)
        places |= {f"messages[{index}]": where for index in range(before, len(messages))}
    if messages[-1]["role"] == "assistant":
        refuse(
            "messages", given, "the last message is the assistant's, which is not continued here; end with the user's"
        )
    return messages


def _of_user(blocks: list[tuple[str, dict[str, Any]]], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a user's blocks."""
    messages: list[dict[str, Any]] = []
    for where, block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            content = text_of(f"{where}.content", _defined(block.get("content"), definitions, where), _TEXT)
            identity = _string(block, "tool_use_id", where)
            messages.append({"role": "tool", "tool_call_id": identity, "content": content})
        elif kind == "text":
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append({"type": "text", "text": _string(block, "text", where)})
        else:
            refuse(f"{where}.type", kind, "expected text or tool_result")
    return messages


def _defined(content: object, definitions: dict[str, Any], where: str) -> object:
    """The content of a result, with a tool's definition as text where it refers to one: so Anthropic's model reads it.

    Once in a request, or 80,000 references to a long definition would be gigabytes; from then on its name.
    """
    if not isinstance(content, list):
        return content
    made = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "tool_reference":
            name = part.get("tool_name")
            if not isinstance(name, str) or name not in definitions:
                refuse(f"{where}.content[{index}].tool_name", name, "expected the name of one of the tools")
            part = {"type": "text", "text": dumps(definitions[name]).decode()}
            definitions[name] = name
        made.append(part)
    return made


def _add_to_assistant(messages: list[dict[str, Any]], block: dict[str, Any], where: str) -> None:
    """Adds a block to the assistant's last message, or to a new one where that has what comes after it."""
    kind = block.get("type")
    if kind == "thinking":
        # Its text may have been left out: the turn's own tokens have it then.
        if text := _string(block, "thinking", where):
            _part_of(messages, "reasoning_content")["reasoning_content"] = text
    elif kind == "text":
        part = {"type": "text", "text": _string(block, "text", where)}
        _part_of(messages, "content").setdefault("content", []).append(part)
    elif kind == "tool_use":
        given = block.get("input")
        if not isinstance(given, dict):
            refuse(f"{where}.input", given, "expected an object")
        function = {"name": _string(block, "name", where), "arguments": dumps(given).decode()}
        call = {"id": _string(block, "id", where), "type": "function", "function": function}
        _part_of(messages, "tool_calls").setdefault("tool_calls", []).append(call)
    else:
        refuse(f"{where}.type", kind, "expected text, thinking or tool_use")


def _part_of(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    place = _PARTS.index(part)
    if any(each in messages[-1] for each in _PARTS[place + (part != "reasoning_content") :]):
        messages.append({"role": "assistant"})
    return messages[-1]


def _string(block: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(value := block.get(name), str):
        refuse(f"{where}.{name}", value, "expected text")
    return value


def _tools(tools: object) -> list[dict[str, Any]]:
    if tools is None or tools == []:
        return []
    made = []
    for where, tool in list_of("tools", tools, "expected a list of tools"):
        if tool.get("type") not in (None, "custom"):
            refuse(f"{where}.type", tool["type"], "only tools of type custom are served: the agent runs them")
        function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
        made.append({"type": "function", "function": function | {"parameters": tool.get("input_schema")}})
    return made


def _tool_choice(choice: dict[str, Any], tools: object) -> object:
    if not choice:
        return None
    kind = choice.get("type")
    names = [tool["function"].get("name") for tool in tools] if isinstance(tools, list) else []
    if kind == "any" and not names:
        refuse("tool_choice.type", kind, "it demands a call; give tools")
    if kind == "tool":
        if (name := choice.get("name")) not in names:
            refuse("tool_choice.name", name, "expected the name of one of the tools")
        return {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        refuse("tool_choice.type", kind, "expected auto, any, tool or none")
    return _CHOICES[kind]


def _response_format(value: object) -> object:
    if value is None:
        return None
    form = table_of("output_config.format", value, {"type", "schema"})
    if form.get("type") != "json_schema":
        refuse("output_config.format.type", form.get("type"), "expected json_schema")
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _effort(effort: object, thinking: object, chat: Chat) -> object:
    """The effort of a chat request, where the template reads it; `none` turns thinking off. A model that thinks does so else."""
    kind = table_of("thinking", thinking, {"type", "budget_tokens", "display"}).get("type", "adaptive")
    if kind not in ("adaptive", "between_tools", "disabled", "enabled"):
        refuse("thinking.type", kind, "expected adaptive, between_tools, disabled or enabled")
    if kind == "disabled" and "enable_thinking" in chat.template_variables.difference(chat.template_kwargs):
        return "none"
    return effort if "reasoning_effort" in chat.template_variables else None
