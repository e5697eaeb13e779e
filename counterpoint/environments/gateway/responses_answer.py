"""Writes the answers of OpenAI's Responses API, whole and as the events of a stream.

A turn becomes items: its reasoning, its text and its calls, in this order. `responses_request` reads them back as one message.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway.responses import MODEL, Choice, assistant_message, chat_log_probabilities
from counterpoint.environments.gateway.responses_request import namespaced
from counterpoint.transport.exact_json import dumps


def responses_answer(
    choice: Choice, fields: Mapping[str, Any], chat: Chat, *, log_probabilities: bool
) -> dict[str, Any]:
    """The answer to a request with these `fields`."""
    turn = choice.turn
    is_cut = turn.finish_reason == "length"
    read, written = len(turn.prompt_ids), len(turn.completion_ids)
    tool_choice, parallel = fields.get("tool_choice"), fields.get("parallel_tool_calls")
    return {
        "id": _identity("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": fields.get("instructions"),
        "metadata": fields.get("metadata") or {},
        "model": MODEL,
        "output": _items(choice, chat, fields.get("tools"), log_probabilities=log_probabilities),
        "parallel_tool_calls": True if parallel is None else parallel,
        "temperature": fields.get("temperature"),
        "text": fields.get("text") or {"format": {"type": "text"}},
        "tool_choice": "auto" if tool_choice is None else tool_choice,
        "tools": fields.get("tools") or [],
        "top_p": fields.get("top_p"),
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": turn.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        },
    }


def responses_events(answer: dict[str, Any]) -> Iterator[bytes]:
    """The answer as server-sent events: each part of an item whole in one."""
    begun = {**answer, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    made = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        *(event for place, item in enumerate(answer["output"]) for event in _item_events(place, item)),
        (f"response.{answer['status']}", {"response": answer}),
    ]
    for number, (kind, values) in enumerate(made):
        content = dumps({"type": kind, "sequence_number": number, **values})
        yield b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n"


def _items(choice: Choice, chat: Chat, tools: object, *, log_probabilities: bool) -> list[dict[str, Any]]:
    message, status = assistant_message(choice), "incomplete" if choice.turn.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": _identity("rs"), "summary": [], "content": content, "status": status})
    calls = message.get("tool_calls", [])
    if choice.text or not calls:
        scores = chat_log_probabilities(choice.turn, chat) if log_probabilities else []
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": scores}
        head = {"type": "message", "id": _identity("msg"), "role": "assistant", "status": status}
        items.append({**head, "content": [part]})
    spaces = namespaced(tools)
    for call in calls:
        function = dict(call["function"])
        if found := spaces.get(function["name"]):
            function["namespace"], function["name"] = found
        items.append(
            {"type": "function_call", "id": _identity("fc"), "call_id": call["id"], "status": status, **function}
        )
    return items


def _item_events(place: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": place, "item_id": item["id"]}
    nothing: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    empty = {**item, "status": "in_progress", **nothing}
    yield "response.output_item.added", {"output_index": place, "item": empty}
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        named = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, **named}
    else:
        [part] = item["content"]
        at["content_index"] = 0
        kind = "response." + part["type"]
        scores = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
        yield f"{kind}.delta", {**at, "delta": part["text"], **scores}
        yield f"{kind}.done", {**at, "text": part["text"], **scores}
        yield "response.content_part.done", {**at, "part": part}
    yield "response.output_item.done", {"output_index": place, "item": item}


def _identity(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
