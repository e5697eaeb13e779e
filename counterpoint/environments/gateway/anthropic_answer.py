"""Writes the answers of Anthropic's Messages API, whole and as the events of a stream, and its errors.

A turn becomes blocks: its thinking, its text and its calls, in this order. `anthropic_request` reads them back as one message.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.responses import MODEL, Choice
from counterpoint.transport.exact_json import dumps

_SIGNATURE = "counterpoint"
"""Anthropic's clients keep no thinking without one. Nothing reads it here."""

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic_answer(choice: Choice) -> dict[str, Any]:
    """The answer to a request."""
    turn, stop_reason = choice.turn, _stop_reason(choice)
    cached = turn.cached_tokens or 0
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": _blocks(choice),
        "stop_reason": stop_reason,
        "stop_sequence": choice.ended_by if stop_reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": len(turn.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(turn.completion_ids),
        },
    }


def anthropic_events(answer: dict[str, Any]) -> Iterator[bytes]:
    """The answer as server-sent events: each block whole in one."""
    usage = {**answer["usage"], "output_tokens": 0}
    begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", {"message": begun})
    for index, block in enumerate(answer["content"]):
        empty, deltas = _begun(block)
        yield _event("content_block_start", {"index": index, "content_block": empty})
        for delta in deltas:
            yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", {"delta": ended, "usage": {"output_tokens": answer["usage"]["output_tokens"]}})
    yield _event("message_stop", {})


def anthropic_error(refusal: GatewayRefused) -> dict[str, Any]:
    """A refusal in the shape of this API."""
    kind = _ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": refusal.message}
    if refusal.code:
        error["details"] = {"error_code": refusal.code}
    return {"type": "error", "error": error}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    reply = choice.reply
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": _SIGNATURE})
    if choice.text:
        blocks.append({"type": "text", "text": choice.text})
    blocks += [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in reply.calls]
    return blocks


def _stop_reason(choice: Choice) -> str:
    """As vLLM says it: a turn that was cut says so, also if calls were complete by then; those go before a stop sequence."""
    if choice.turn.finish_reason == "length":
        return "max_tokens"
    if choice.reply.calls:
        return "tool_use"
    return "end_turn" if choice.ended_by is None else "stop_sequence"


def _begun(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": dumps(block["input"]).decode()}]
    deltas = [{"type": f"{name}_delta", name: block[name]} for name in ("thinking", "signature")]
    return {**block, "thinking": "", "signature": ""}, deltas


def _event(kind: str, values: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dumps({"type": kind, **values}) + b"\n\n"
