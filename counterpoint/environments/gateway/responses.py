"""Writes the answers of OpenAI's chat and completions APIs, whole and as the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from counterpoint.environments.base import Reply
from counterpoint.environments.chat import Chat, Message
from counterpoint.environments.messages import MOST_DEPTH, is_deep
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.records import Turn

MODEL = "policy"
"""The one model that is served. A request may name any."""


LEAST_LOG_PROBABILITY = -9999.0
"""What stands for a token that could not be sampled."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One turn of an answer."""

    turn: Turn
    text: str
    """What the agent reads as its content."""
    reply: Reply
    """With the reasoning that the agent reads."""
    ended_by: str | None = None
    """The stop string of the agent's own that ended the turn, whether in its reasoning or after it."""


def choice_of(turn: Turn, reply: Reply, stop: Sequence[str], chat: Chat) -> Choice:
    """Returns what an agent with these stop strings reads of a turn: what was written before the first of them."""
    ids = turn.completion_ids.tolist() if stop else []
    # A server looks for stop strings in what comes before the token that ends a turn, as vLLM does.
    written = chat.transcribe([ids[:-1] if ids and ids[-1] in chat.stop_token_ids else ids])[0] if ids else ""
    places = [(place + len(each), place, each) for each in stop if (place := written.find(each)) >= 0]
    if not places:
        return Choice(turn, reply.content, reply)
    _, place, ended_by = min(places)

    def before(part: str) -> str:
        """What a parser returned of the turn's end; it may have taken white space away."""
        at = part.find(ended_by)
        return part[:at] if at >= 0 else part.removesuffix(written[place:].strip())

    if reply.content:
        return Choice(turn, before(reply.content), reply, ended_by)
    return Choice(turn, "", replace(reply, reasoning=before(reply.reasoning)), ended_by)


def unsendable(reply: Reply) -> str:
    """Returns why the calls of a reply cannot be sent, for a model to read; empty if they can."""
    for call in reply.calls:
        if is_deep(call.arguments):
            return f"{call.name}: its arguments are more than {MOST_DEPTH} levels deep"
        try:
            dumps(call.arguments)
        except TypeError:
            return f"{call.name}: its arguments hold half a character"
    return ""


def assistant_message(choice: Choice) -> Message:
    """The message as OpenAI's API writes it; arguments of calls are JSON as text."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reply.reasoning:
        message["reasoning_content"] = choice.reply.reasoning
    if choice.reply.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dumps(call.arguments).decode()},
            }
            for call in choice.reply.calls
        ]
    return message


def chat_answer(choices: Sequence[Choice], chat: Chat, *, log_probabilities: bool) -> dict[str, Any]:
    """The answer to a chat request."""
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": index,
                "message": assistant_message(choice),
                "logprobs": {"content": chat_log_probabilities(choice.turn, chat)} if log_probabilities else None,
                "finish_reason": _chat_finish_reason(choice),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _usage(choices, prompts=1),
    }


def completion_answer(
    choices: Sequence[Choice], chat: Chat, *, prompts: int, log_probabilities: bool
) -> dict[str, Any]:
    """The answer to a completions request of so many prompts."""
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "logprobs": _text_log_probabilities(choice.turn, chat) if log_probabilities else None,
                "finish_reason": _finish_reason(choice.turn),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _usage(choices, prompts),
    }


def events(answer: dict[str, Any], *, include_usage: bool) -> Iterator[bytes]:
    """The answer as server-sent events: each choice's content whole in one, and its end in another."""
    is_chat = answer["object"] == "chat.completion"
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else answer["object"]
    if include_usage:
        head["usage"] = None
    for choice in answer["choices"]:
        index, end = choice["index"], {"finish_reason": choice["finish_reason"]}
        if is_chat:
            delta = dict(choice["message"])
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
            first = {"index": index, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
            last = {"index": index, "delta": {}, "logprobs": None, **end}
        else:
            first, last = {**choice, "finish_reason": None}, {"index": index, "text": "", "logprobs": None, **end}
        yield _event({**head, "choices": [first]})
        yield _event({**head, "choices": [last]})
    if include_usage:
        yield _event({**head, "choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def _chat_finish_reason(choice: Choice) -> str:
    """A turn that was cut says so, also if calls were complete by then."""
    reason = _finish_reason(choice.turn)
    return "tool_calls" if choice.reply.calls and reason == "stop" else reason


def _finish_reason(turn: Turn) -> str:
    return "length" if turn.finish_reason == "length" else "stop"


def _usage(choices: Sequence[Choice], prompts: int) -> dict[str, int]:
    each = len(choices) // prompts
    read = sum(len(choice.turn.prompt_ids) for choice in choices[::each])
    written = sum(len(choice.turn.completion_ids) for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def chat_log_probabilities(turn: Turn, chat: Chat) -> list[dict[str, Any]]:
    """The log-probability of each token of a turn, in nats, as the chat API writes them."""
    values, alternatives = turn.log_probabilities.tolist(), _alternatives(turn, chat)
    return [
        _token(token, value) | {"top_logprobs": [_token(*each) for each in others]}
        for token, value, others in zip(_tokens(turn, chat), values, alternatives, strict=True)
    ]


def _token(text: str, log_probability: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_probability, "bytes": list(text.encode())}


def _alternatives(turn: Turn, chat: Chat) -> list[list[tuple[str, float]]]:
    """Text and log-probability of the most probable tokens at each place, none if they were not asked for."""
    if (found := turn.alternatives) is None:
        return [[] for _ in turn.completion_ids]
    ids_TK, values_TK = found.token_ids_TK, found.log_probabilities_TK
    texts = iter(chat.transcribe(ids_TK.reshape(-1, 1).tolist()))
    # JSON has no infinity. vLLM writes this number, as OpenAI does.
    return [[(next(texts), max(value, LEAST_LOG_PROBABILITY)) for value in row] for row in values_TK.tolist()]


def _text_log_probabilities(turn: Turn, chat: Chat) -> dict[str, Any]:
    return {
        "tokens": _tokens(turn, chat),
        "token_logprobs": turn.log_probabilities.tolist(),
        "top_logprobs": None if turn.alternatives is None else [dict(row) for row in _alternatives(turn, chat)],
        "text_offset": None,
    }


def _tokens(turn: Turn, chat: Chat) -> list[str]:
    return chat.transcribe([[token_id] for token_id in turn.completion_ids.tolist()])
