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
import secrets
from array import array
from asyncio import _get_running_loop
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from counterpoint.environments.chat_marks import (
    MARK,
    PROMPT,
    Closing,
    after_completion,
    alike,
    marked_messages,
    marks_of,
    said_message,
)
from counterpoint.environments.chat_template import ChatTemplates
from counterpoint.environments.text_pieces import may_be_cut, pieces_of
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.records import Turn

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

_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""The usual fields of a message. Many templates read only some of them, so nothing is said of one that is not read."""

_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"counterpoint": {"type": "string", "description": "Where."}}},
    },
}

_LAST = 1024
"""The tokens of a completion that are looked at to find its end."""

_MOST_SHAPES = 512
"""The shapes of conversations that a chat keeps in mind."""


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
        """Fields of messages that the log has named, since the template does not read them, or leaves them out somewhere."""
        self._closings: dict[tuple[object, ...], Closing] = {}
        """What `_closing` returned, with and without tools, by the names of the turn's calls."""
        self._kept: dict[bytes, str] = {}
        """What the template drops of a conversation, by the conversation's shape."""
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
        chat._closings, chat._kept, chat._unread = {}, {}, set()
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

        Raises `ValueError` when the template refuses the messages, drops one of them, or does not read `tools` that are given.
        """
        return self.start_packed(messages, tools).tolist()

    def start_packed(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> array[int]:
        """Does as `start`, and returns an array of int32. Of threads that start equal conversations, one encodes."""
        opening = None if self._templates.of(tools).reads_clock else _as_json(messages, tools)
        with _in_turn(0 if opening is None else len(opening)):
            newest = self._newest_start  # once: threads share the chat
            if opening is None or newest is None or newest[0] != opening:
                self.check_kept(messages, tools)
                ids = self.encode_packed(self.render(messages, tools, add_generation_prompt=True))
                if opening is None:
                    return ids
                self._newest_start = newest = (opening, ids)
            return newest[1][:]

    def extend(
        self,
        turn: Turn,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> array[int]:
        """Returns the prompt ids of the next turn, as an array of int32.

        They are `turn`'s prompt and completion token for token, then the tokens that the template puts between that
        completion and the next one, `messages` included. `calls` are those that the turn makes, in the form of a message's
        `tool_calls`: Gemma 4's template, for one, writes a result by the call that it answers, and none without. A completion
        that was cut by its length gets the template's end of turn, as does one that a stop string ended; one that ended with a
        stop token keeps its own, also where that is the one that begins what follows, as in GLM's turns. Raises `ValueError` when
        the template refuses the messages, drops one of them, or cannot extend a conversation token for token.
        """
        following = self._following(turn.completion_ids.tolist()[-_LAST:], messages, tools, calls)
        extended = tokens_of(turn)
        extended.extend(following)
        return extended

    def check(self, *, calls: bool = False) -> None:
        """Raises `ValueError` if no rollout could be played: the template drops a message's text.

        `calls`: also if it reads no tools, or cannot go on after a turn that makes one call, or two.
        """
        self.check_kept([PROMPT])
        for number in (1, 2) if calls else ():
            made = [
                {"id": f"call0000{each}", "type": "function", "function": {"name": "look"}} for each in range(number)
            ]
            results = [{"role": "tool", "tool_call_id": call["id"], "name": "look", "content": "text"} for call in made]
            try:
                self._following([], results, [_TOOL], made)
            except ValueError as error:
                raise ValueError(f"{error} (tried: what follows {number} calls in one turn)") from error

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

    def encode_text(self, text: str) -> array[int]:
        """Returns the ids of a text that stands by itself, as vLLM's completions read one, as an array of int32.

        They have what the tokenizer puts around it, such as a token for the beginning of a text.
        """
        around = self._tokenizer.encode("a")
        added = around.special_tokens_mask
        first = added.index(0) if 0 in added else len(added)
        after = array("i", (each for each, new in zip(around.ids[first:], added[first:], strict=True) if new))
        return array("i", around.ids[:first]) + self.encode_packed(text) + after

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
        messages = [_with_reasoning(message, template.names) for message in messages]
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
                    "messages": messages,
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

    def check_kept(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), first: int = 0, *, answers: bool = False
    ) -> None:
        """Raises `ValueError` if the model never reads a text, or a call, of the messages from the one numbered `first`.

        Only what is written after the message before that one counts: an extended conversation gets that alone. The conversation
        is rendered with a mark in each place, once for each shape. A template may forget what it wrote while it was the newest.
        What an assistant says is checked with `answers` only: a rollout has it in its tokens.
        """
        marked, marks = marked_messages(messages, first, answers=answers)
        names = [str((tool.get("function") or tool).get("name") or "") for tool in tools]
        shape = blake2b(_as_json([*marked, {"tools": names}], tools[:1]) or secrets.token_bytes()).digest()
        if (dropped := self._kept.get(shape)) is None:
            try:
                text = self.render(marked, tools, add_generation_prompt=True)
            except ValueError:
                return  # it refuses the messages, too, or marks in them
            written = set(MARK.findall(after_completion(text)))
            missing = (each for each in marks.items() if each[0] not in written)
            unwritten = (place for mark, (index, place) in missing if not self._writes(mark, marked, index, tools))
            dropped = next(unwritten, "") or next((f"the tool {name!r}" for name in names if name not in text), "")
            if not dropped and len(tools) > 1 and self._is_same(marked, tools[:-1], text, add_generation_prompt=True):
                dropped = f"the tool {names[-1]!r}"
            if len(self._kept) >= _MOST_SHAPES:
                self._kept.clear()
            self._kept[shape] = dropped
        if dropped:
            raise ValueError(
                f"{self._directory}: its chat template drops {dropped}: the model would never read it. Expected a template that "
                "writes every tool, the text of every message, and each result of a tool after the message whose call it answers"
            )

    def warn_of_lost(self, messages: Sequence[Message], tools: Sequence[Tool], written: str, begins: int) -> None:
        """Logs, once for each field, what of the last message the template leaves out at this place.

        `written` is the rendered conversation, in which this message is at `begins` or later. Some templates write reasoning for
        some messages alone, or cut it out of the text.
        """
        last = messages[-1]
        lost = [
            name
            for name in last.keys() - _FIELDS - self._unread
            if last[name]
            and self._is_same([*messages[:-1], {key: last[key] for key in last if key != name}], tools, written)
        ]
        lost += self._lost_of_calls(messages, tools, written, written[begins:])
        named = (str(each["name"]) for each in messages if each.get("name") and each.get("role") != "tool")
        lost += ["name"] if "name" not in self._unread and any(name not in written for name in named) else []
        content = last.get("content")
        if (
            "content" not in self._unread
            and isinstance(content, str)
            and _dense(content) not in _dense(written[begins:])
        ):
            lost.append("content")
        if not (lost := list(dict.fromkeys(lost))):
            return
        self._unread |= set(lost)
        logger.warning(
            "%s: its chat template leaves out %s of a message of role %s, or a part of it: the model learns to write none of it; "
            "set chat_template_kwargs or another chat template if it is to be learned",
            self._directory,
            ", ".join(map(repr, sorted(lost, key=str))),
            last.get("role"),
        )

    def _lost_of_calls(
        self, messages: Sequence[Message], tools: Sequence[Tool], written: str, said: str
    ) -> Iterator[str]:
        """Yields what of the last message's calls the template leaves out: a name, or an argument. `said`: its text."""
        calls = list(messages[-1].get("tool_calls") or ())
        for place, call in enumerate(calls):
            function = call["function"]
            without = {} if function["name"] in said else {"name": {**function, "name": "counterpoint"}}
            for key in function["arguments"]:
                if key not in said:
                    others = {name: value for name, value in function["arguments"].items() if name != key}
                    without[f"arguments.{key}"] = {**function, "arguments": others}
            for name, changed in without.items():
                made = [*calls[:place], {**call, "function": changed}, *calls[place + 1 :]]
                label = f"tool_calls.function.{name}"
                other = [*messages[:-1], {**messages[-1], "tool_calls": made}]
                if label not in self._unread and self._is_same(other, tools, written):
                    yield label

    def _is_same(
        self, messages: Sequence[Message], tools: Sequence[Tool], written: str, *, add_generation_prompt: bool = False
    ) -> bool:
        """Whether the template writes the same of other messages, or other tools."""
        with suppress(ValueError):
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt) == written
        return False

    def _writes(self, mark: str, messages: Sequence[Message], index: int, tools: Sequence[Tool]) -> bool:
        """Whether the template writes the message at `index`, which has the mark, when no turn follows it."""
        prompts = messages[index].get("role") != "assistant"
        end = index + 1
        while prompts and end < len(messages) and messages[end].get("role") != "assistant":
            end += 1
        with suppress(ValueError):
            return mark in after_completion(self.render(messages[:end], tools, add_generation_prompt=prompts))
        return False

    def _following(
        self,
        completion: list[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
        calls: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """Returns the ids that follow a completion."""
        last = [each for each in completion[-1:] if each in self.stop_token_ids]
        if calls:
            with suppress(ValueError):  # a template may refuse several calls at once, or write none
                return self._after_calls(completion, last, messages, tools, calls)
        closing = self._closing(tools, ())
        following = self.encode(self._after_completion(messages, tools, (), add_generation_prompt=True))
        self.check_kept([PROMPT, said_message(()), *messages], tools, first=2)
        written = len(closing.ids)
        if tuple(following[:written]) != closing.ids:
            raise ValueError(
                f"{self._directory}: its chat template closes a turn differently once others follow, "
                "so a conversation cannot be extended token for token"
            )
        if last and not written and following[:1] == last:
            written = 1
        return following[written:] if last else following

    def _after_calls(
        self,
        completion: list[int],
        last: list[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
        calls: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """Does as `_following` for a completion that makes `calls`. `last` is the stop token that ended it, if one did."""
        self.check_kept([PROMPT, said_message(calls), *messages], tools, first=2)
        closing = self._closing(tools, calls)
        rendered = self._after_completion(messages, tools, calls, add_generation_prompt=True)[closing.begins :]
        if closing.ids:
            following = self.encode(rendered)
            written = len(closing.ids)
            if tuple(following[:written]) != closing.ids:
                raise ValueError(f"{self._directory}: its chat template closes a call differently once others follow")
            # Gemma 4's end of a call, which is not that of text, begins a result: after another end it is still to be written.
            opens = closing.ids[-1:] != self._closing(tools, ()).ids[-1:] and (*last,) != closing.ids[-1:]
            return following[written:] if last and not opens else following[written - 1 :]
        # No token says where the calls end: they do where the end of the completion and the template's text agree, or else
        # where the template ends a turn of text.
        text, end = rendered[: alike(closing.text, rendered)], self._closing(tools, ()).text
        said = self.transcribe([completion[: len(completion) - len(last)]])[0]
        otherwise = len(text) - len(end) * text.endswith(end)
        written = next((length for length in range(len(text), 0, -1) if said.endswith(text[:length])), otherwise)
        following = self.encode(rendered[written:])
        return following[1:] if last and following[:1] == last else following

    def _after_completion(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        calls: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Returns the text after a completion, or after the value that stands in the last call that the template writes."""
        rendered = self.render(
            [PROMPT, said_message(calls), *messages], tools, add_generation_prompt=add_generation_prompt
        )
        for mark in reversed(marks_of(calls)):
            _, found, following = rendered.partition(mark)
            if found:
                return following
        raise ValueError(
            f"{self._directory}: its chat template drops what the assistant said, so a conversation cannot be extended"
        )

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

    def _closing(self, tools: Sequence[Tool], calls: Sequence[Mapping[str, Any]]) -> Closing:
        """Returns what the template writes after a completion that nothing follows, or after the arguments of its last call."""
        key = (bool(tools), *(call["function"]["name"] for call in calls))
        if (known := self._closings.get(key)) is not None:
            return known
        text = after = self._after_completion([], tools, calls, add_generation_prompt=False)
        if calls:  # what is the same without arguments comes after them
            without = self.render(
                [PROMPT, said_message(calls, has_arguments=False)], tools, add_generation_prompt=False
            )
            text = after[len(after) - alike(after[::-1], without[::-1]) :]
        ids = self.encode(text)
        ends = [position for position, token_id in enumerate(ids) if token_id in self.stop_token_ids]
        closing = Closing(len(after) - len(text), text, tuple(ids[: ends[0] + 1] if ends else ()))
        if len(self._closings) >= _MOST_SHAPES:
            self._closings.clear()
        return self._closings.setdefault(key, closing)


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


def _dense(text: str) -> str:
    """Returns a text without white space, of which templates write more or less."""
    return "".join(text.split())


def _with_reasoning(message: Message, names: frozenset[str]) -> Message:
    """Returns a message whose reasoning has each of its two names that the template reads, as vLLM gives it both."""
    text = message.get("reasoning_content")
    if text is None or "reasoning" not in names or "reasoning" in message:
        return message
    others = {name: value for name, value in message.items() if name in names or name != "reasoning_content"}
    return {**others, "reasoning": text}


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
