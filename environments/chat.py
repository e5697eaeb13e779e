"""Conversations as token ids: starts one, extends one after a completion, and decodes.

It reads a model directory's `tokenizer.json` and its own Jinja chat template, sandboxed, and needs no `transformers`, which
would bring torch into the orchestrator. A completion is never decoded and tokenized again, since that need not give the same
ids: `extend` keeps its tokens and adds only those that the template puts after them.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import os
from array import array
from asyncio import _get_running_loop
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import RLock
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from environments.chat_template import ChatTemplates
from environments.text_pieces import may_be_cut, pieces_of
from transport.exact_json import dumps
from transport.records import Turn

# The tokenizer would divide each batch among threads of its own. We decode some short texts at a time, for which waking these
# threads takes 17 microseconds where decoding takes 3, and far longer where other processes have the cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Message = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`, and whatever else the model's template reads."""

Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": <JSON schema>}}`."""

LONG_TEXT = 20_000
"""Characters that take some milliseconds to encode. Longer texts are for a thread."""

logger = logging.getLogger(__name__)

_LONG_TEXT = RLock()
"""Held by the one thread that encodes a long text. The tokenizer works without the GIL, but what it returns is converted and
freed with it: with a thread for each text, an event loop would wait for all of them, and for a core."""

_SLICE = 8192
"""Ids packed at once, in an eighth of a millisecond."""

_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
"""Of a message. That a template reads only some of these is no surprise."""

# Stands for a completion when the template is rendered to find the text after one. Templates trim and split the assistant's
# text, so it has no white space and no angle brackets.
_COMPLETION = "counterpoint:completion"
_BEFORE: tuple[Message, Message] = (
    {"role": "user", "content": "counterpoint:prompt"},
    {"role": "assistant", "content": _COMPLETION},
)


class Chat:
    """The tokenizer and the chat template of one model. Safe to share: no conversation changes another."""

    stop_token_ids: tuple[int, ...]
    """The ids that end a turn, as the model's generation config and tokenizer name them, in rising order."""
    vocabulary: int
    """The number of tokens."""

    def __init__(self, model_directory: Path | str) -> None:
        """Reads the directory; raises `ValueError` that names the invalid file."""
        self._directory = Path(model_directory)
        tokenizer_file = self._directory / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise ValueError(
                f"{tokenizer_file} does not exist: a model directory needs a fast tokenizer (tokenizer.json)"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # tokenizers raises nothing more particular
            raise ValueError(f"{tokenizer_file} is not a tokenizer: {error}") from error
        # The file has what the program that saved it, such as a trainer, set last for its own data.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _read_json(self._directory / "tokenizer_config.json")
        # The map is an older file, for what the newer one does not name.
        self._special_tokens = _special_tokens(
            _read_json(self._directory / "special_tokens_map.json")
        ) | _special_tokens(settings)
        self._add_tokens(settings)
        self._may_be_cut = may_be_cut(self._tokenizer)
        self._templates = ChatTemplates(self._directory, settings)
        self._template_kwargs: Mapping[str, Any] = {}
        self._unread: set[Any] = set()
        """Fields of messages that the log has named, since the template does not read them."""
        self._closings: dict[bool, tuple[int, ...]] = {}
        """What `_closing_ids` returned with and without tools."""
        self.stop_token_ids = self._find_stop_token_ids()
        self.vocabulary = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._newest_start: tuple[bytes, array[int]] | None = None
        """The newest opening that was asked for, as JSON, and its ids: the rollouts of a group begin alike, one after another."""
        # The first rendering prepares what all later ones use: 50 ms, which are spent here and not on an event loop.
        with suppress(ValueError):
            self.render([{"role": "user", "content": ""}], add_generation_prompt=True)

    def with_template_kwargs(self, kwargs: Mapping[str, Any]) -> Chat:
        """Returns the same chat with further variables for its template.

        Raises `ValueError` for a variable that the template never reads.
        """
        for name in kwargs:
            if name not in self._templates.variables:
                matches = difflib.get_close_matches(name, self._templates.variables, n=1)
                nearest = f"; did you mean {matches[0]!r}?" if matches else "."
                raise ValueError(
                    f"chat_template_kwargs: the chat template of {self._directory} does not read {name!r}{nearest} "
                    f"It reads {', '.join(sorted(self._templates.variables))}"
                )
        chat = copy.copy(self)
        chat._template_kwargs = dict(kwargs)
        chat._newest_start = None
        chat._closings = {}
        return chat

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that its template reads."""
        return self._templates.variables

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """The further variables that its template gets."""
        return self._template_kwargs

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the prompt ids that open a conversation, up to where the assistant is to write.

        Raises `ValueError` when the template refuses the messages, or does not read `tools` that are given.
        """
        return self.start_packed(messages, tools).tolist()

    def start_packed(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> array[int]:
        """Does as `start`, and returns an array of int32. Of threads that start equal conversations, one encodes."""
        opening = None if self._templates.of(tools).reads_clock else _as_json(messages, tools)
        with _in_turn(0 if opening is None else len(opening)):
            newest = self._newest_start  # once: threads share the chat
            if opening is None or newest is None or newest[0] != opening:
                ids = self.encode_packed(self.render(messages, tools, add_generation_prompt=True))
                if opening is None:
                    return ids
                self._newest_start = newest = (opening, ids)
            return newest[1][:]

    def extend(self, turn: Turn, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> array[int]:
        """Returns the prompt ids of the next turn, as an array of int32.

        They are `turn`'s prompt and completion token for token, then the tokens that the template puts between that
        completion and the next one, `messages` included. A completion that was cut by its length gets the template's end of
        turn, as does one that a stop string ended; one that ended with a stop token keeps its own, also where that is the one
        that begins what follows, as in GLM's turns. Raises `ValueError` when the template refuses the messages or cannot extend
        a conversation token for token.
        """
        following = self.encode(self._after_completion(messages, tools, add_generation_prompt=True))
        closing = self._closing_ids(tools)
        written = len(closing)
        if tuple(following[:written]) != closing:
            raise ValueError(
                f"{self._directory}: its chat template closes a turn differently once others follow, "
                "so a conversation cannot be extended token for token"
            )
        last = int(turn.completion_ids[-1]) if len(turn.completion_ids) else None
        ended = last in self.stop_token_ids
        if ended and not written and following[:1] == [last]:
            written = 1
        extended = tokens_of(turn)
        extended.extend(following[written:] if ended else following)
        return extended

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode([int(token_id) for token_id in token_ids], skip_special_tokens=True)
        return text

    def transcribe(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Returns the text of each sequence of token ids, special tokens included. Releases the GIL while it decodes."""
        texts: list[str] = self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=False)
        return texts

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text, with special tokens only where the text names them.

        A template writes its own, a leading one included. See `encode_packed` for long ones.
        """
        # As a batch, for which the tokenizer releases the GIL, and without the places of the tokens, which nobody reads.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_packed(self, text: str) -> array[int]:
        """Does as `encode`, and returns an array of int32. In a thread, a long text waits until no other one is encoded."""
        with _in_turn(len(text)):
            packed = array("i")
            for piece in pieces_of(text, LONG_TEXT) if self._may_be_cut else [text]:
                ids = self.encode(piece)
                while ids:  # in slices: at the end of each, the event loop may have the GIL
                    packed.extend(ids[:_SLICE])
                    del ids[:_SLICE]
            return packed

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, add_generation_prompt: bool) -> str:
        """Returns the text of a conversation, with `add_generation_prompt` up to where the assistant is to write.

        Raises `ValueError` as `start`.
        """
        template = self._templates.of(tools)
        if tools and "tools" not in template.variables:
            raise ValueError(
                f"{self._directory}: its chat template does not read `tools`, so the model cannot be given any"
            )
        for message in messages:
            if unread := message.keys() - _FIELDS - template.names - self._unread:
                self._unread |= unread
                logger.warning(
                    "%s: its chat template does not read %s of a message of role %s: what it says is left out",
                    self._directory,
                    ", ".join(map(repr, sorted(unread, key=str))),
                    message.get("role"),
                )
        given: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            return template.render(
                {
                    "messages": list(messages),
                    "add_generation_prompt": add_generation_prompt,
                    **self._special_tokens,
                    **self._template_kwargs,
                    **given,
                }
            )
        except (TemplateError, TypeError, AttributeError, LookupError) as error:
            # A template may, for example, add text and a list.
            roles = ", ".join(str(message.get("role")) for message in messages)
            fails = "refuses" if type(error) is TemplateError else f"fails with {type(error).__name__} on"
            raise ValueError(
                f"{self._directory}: its chat template {fails} messages of roles [{roles}]: {error}"
            ) from error

    def _after_completion(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, add_generation_prompt: bool
    ) -> str:
        rendered = self.render([*_BEFORE, *messages], tools, add_generation_prompt=add_generation_prompt)
        _, found, following = rendered.partition(_COMPLETION)
        if not found:
            raise ValueError(
                f"{self._directory}: its chat template drops what the assistant said, so a conversation cannot be extended"
            )
        return following

    def _add_tokens(self, settings: Mapping[str, Any]) -> None:
        """Adds the tokens that only `tokenizer_config.json` names, as transformers does: they would be split otherwise."""
        config = self._directory / "tokenizer_config.json"
        named = settings.get("added_tokens_decoder") or {}
        try:
            wanted = {int(number): _added_token(fields) for number, fields in named.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{config}: added_tokens_decoder is malformed: {error!r}") from error
        known = set(map(repr, self._tokenizer.get_added_tokens_decoder().values()))
        missing = {number: wanted[number] for number in sorted(wanted) if repr(wanted[number]) not in known}
        self._tokenizer.add_tokens(list(missing.values()))
        for number, token in missing.items():
            if (found := self._tokenizer.token_to_id(token.content)) != number:
                raise ValueError(
                    f"{config}: added_tokens_decoder gives {token.content!r} the id {number}; with tokenizer.json it is {found}"
                )

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self._directory / name).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        if (token := self._special_tokens.get("eos_token")) is not None:
            token_id = self._tokenizer.token_to_id(token)
            if token_id is None:
                raise ValueError(f"{self._directory}: eos_token {token!r} is not in tokenizer.json")
            found.add(token_id)
        if not found:
            raise ValueError(
                f"{self._directory}: nothing names the token that ends a turn; set eos_token_id in generation_config.json"
            )
        return tuple(sorted(found))

    def _closing_ids(self, tools: Sequence[Tool]) -> tuple[int, ...]:
        """Returns the ids that the template writes after a completion, up to and including the token that ends the turn.

        Empty if its turns end without such a token. A completion that ended with a stop token has them already.
        """
        if (known := self._closings.get(bool(tools))) is not None:
            return known
        closing = self.encode(self._after_completion([], tools, add_generation_prompt=False))
        ends = [position for position, token_id in enumerate(closing) if token_id in self.stop_token_ids]
        return self._closings.setdefault(bool(tools), tuple(closing[: ends[0] + 1] if ends else ()))


def _in_turn(length: int) -> AbstractContextManager[object]:
    """Returns the lock for a text of this length, if it is long. An event loop would stand still until all threads had it."""
    return _LONG_TEXT if length > LONG_TEXT and _get_running_loop() is None else nullcontext()


def tokens_of(turn: Turn) -> array[int]:
    """Returns prompt and completion of a turn as an array of int32."""
    # Not a list, which takes milliseconds of the event loop for a long context, and nine times the memory.
    tokens = array("i", turn.prompt_ids.tobytes())
    tokens.frombytes(turn.completion_ids.tobytes())
    return tokens


def _as_json(messages: Sequence[Message], tools: Sequence[Tool]) -> bytes | None:
    """Returns a conversation as JSON, or None if it holds what JSON cannot."""
    try:
        return dumps([list(messages), list(tools)])
    except TypeError:
        return None


def _added_token(fields: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{flag: fields[flag] for flag in flags if flag in fields})


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, which a template may name; a token is a string or an object with `content`."""
    named = {key: value for key, value in settings.items() if key.endswith("_token") and value}
    contents = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in contents.items() if isinstance(value, str)}


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, expected an object")
    return value
