"""Turns the message histories of a chat API into prompts without guessing tokens.

A chat API has no state: each request repeats the whole history as text. `Histories` remembers for one rollout which history,
the assistant's answer included, ended in which turn. A request whose messages begin with such a history continues that turn's
tokens (`Chat.extend`); the longest known history wins. Any other request, such as one with a shortened history, another system
prompt or an edited answer, is rendered from its text (`Chat.start`), and so opens a branch of its own. Text prompts of the
completions API are treated likewise. Only digests of the histories are kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from counterpoint.environments.chat import Chat, Message, Tool, tokens_of
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.records import Turn

_DIGEST_BYTES = 16
_REASONING = "reasoning_content"


@dataclass(frozen=True, slots=True)
class _Known:
    """The end of a known history."""

    turn: Turn
    reasoning: str
    """What its answer reasoned. A client may send it back or leave it out."""


class Histories:
    """The histories of one rollout, and the turns in which they ended."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._histories: dict[bytes, _Known] = {}
        self._otherwise: dict[bytes, Histories] = {}
        """What was rendered, by the template's variables: see `rendered_with`."""
        self._texts: dict[int, dict[bytes, tuple[Turn, str]]] = {}
        """Texts, by their number of UTF-8 bytes: digests of the texts that ended in a turn, and what the answer left
        out at the end."""

    def rendered_with(self, template_kwargs: Mapping[str, Any]) -> Histories:
        """Returns the histories whose prompts the template renders with these variables; itself for none.

        They are apart, since other variables make other tokens of the same messages.
        """
        if not template_kwargs:
            return self
        key = dumps(template_kwargs, option=orjson.OPT_SORT_KEYS, default=repr)
        if key not in self._otherwise:
            self._otherwise[key] = Histories(self._chat.with_template_kwargs(template_kwargs))
        return self._otherwise[key]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> array[int]:
        """Returns the prompt ids of a chat request, as an array of int32.

        `messages` have the form of `messages.template_messages`. Raises `ValueError` when the template refuses them.
        """
        digests = _digests(messages, tools)
        for length in range(len(messages), 0, -1):
            known = self._histories.get(digests[length - 1])
            if known is None or messages[length - 1].get(_REASONING, known.reasoning) != known.reasoning:
                continue
            try:
                calls = messages[length - 1].get("tool_calls", ())
                return self._chat.extend(known.turn, messages[length:], tools, calls)
            except ValueError:
                break  # a template that cannot continue a turn, or not with these messages: from the text, then
        return self._chat.start_packed(messages, tools)

    def remember(self, messages: Sequence[Message], tools: Sequence[Tool], answer: Message, turn: Turn) -> None:
        """Notes that `messages`, followed by the assistant's `answer`, ended in `turn`."""
        reasoning = str(answer.get(_REASONING, ""))
        self._histories[_digests([*messages, answer], tools)[-1]] = _Known(turn, reasoning)

    def text_prompt(self, text: str) -> array[int]:
        """Returns the prompt ids of a text that the model is to continue, as an array of int32."""
        content = text.encode()
        digest, end = blake2b(digest_size=_DIGEST_BYTES), 0
        found: list[tuple[int, Turn, str]] = []
        for length in sorted(self._texts):
            if length > len(content):
                break
            digest.update(content[end:length])
            end = length
            if (known := self._texts[length].get(digest.digest())) is not None:
                found.append((length, *known))
        # An agent that writes on has all of its turns there. What follows the longest is encoded, and nothing else.
        for length, turn, cut in reversed(found):
            if (prompt := self._continued(turn, cut, content[length:])) is not None:
                return prompt
        return self._chat.encode_text(text)

    def remember_text(self, text: str, completion: str, cut: str, turn: Turn) -> None:
        """Notes that a text prompt, the completion as it was returned and the text `cut` from its end ended in `turn`."""
        content = (text + completion).encode()
        self._texts.setdefault(len(content), {})[blake2b(content, digest_size=_DIGEST_BYTES).digest()] = turn, cut

    def _continued(self, turn: Turn, cut: str, rest: bytes) -> array[int] | None:
        """The turn's tokens and then those of `rest`. None if `rest` leaves out text or the end of turn that the turn wrote."""
        last, unseen = turn.completion_ids[-1:].tolist(), cut
        if last and last[0] in self._chat.stop_token_ids:
            unseen += self._chat.transcribe([last])[0]
        if not rest.startswith(unseen.encode()):
            return None
        return tokens_of(turn) + self._chat.encode_packed(rest[len(unseen.encode()) :].decode())


def _digests(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """The digests of the histories that end with each message. Reasoning is left out of them."""
    digest = blake2b(_canonical(list(tools)), digest_size=_DIGEST_BYTES)
    found = []
    for message in messages:
        content = _canonical(_without_reasoning(message))
        digest.update(b"%d:" % len(content))
        digest.update(content)
        found.append(digest.digest())
    return found


def _without_reasoning(message: Message) -> Mapping[str, Any]:
    return {name: value for name, value in message.items() if name != _REASONING}


def _canonical(value: Any) -> bytes:
    return dumps(value, option=orjson.OPT_SORT_KEYS)
