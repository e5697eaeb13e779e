"""The program that parses completions with vLLM's parsers: one process beside each API server, which `parsing` starts and asks.

A model writes what it likes, and some parsers take exponential time for some texts. In a process of its own that costs no other
request anything: each text has a bounded CPU time, and the process can be killed. Frames on standard input and output are a
length (four bytes, little-endian) and JSON.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import orjson

from counterpoint.inference.cut_calls import Calls, EndedCalls, complete_calls
from counterpoint.transport.exact_json import loads
from counterpoint.transport.frames import BadFrame, Framing

CPU_SECONDS = 1.0
"""Most CPU seconds for one text. Real ones take a millisecond per thousand tokens."""

MAX_FRAME_BYTES = 1 << 24
"""Longest frame: a megabyte of tools and two million tokens as numbers."""

FRAMING = Framing(MAX_FRAME_BYTES)

_COMMON_MARKS = ("<tool_call>", "</tool_call>", "<function=", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>")
"""What opens a call for most parsers. A parser's own marks are looked up in its attributes."""


class _TookTooLong(BaseException):
    """Not an `Exception`: the parsers catch those."""


@dataclass(slots=True)
class _Found:
    """What a parser makes of a text."""

    text: str
    content: str
    reasoning: str
    calls: Calls
    begun: int
    """The place in the text where the last call was begun, in characters; -1 if there is none. Reasoning may mention
    the marks."""
    by_engine: bool
    """The parser is one of vLLM's engines, which tells of the end of each call."""
    left_out: bool
    """A call was left out, since the text ended within it."""


class TextParser:
    """Parses one model's completions. `settings` are those of `parsing.ParserProcess`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

        from counterpoint.inference.plugin.tokenizer import read_by_file

        read_by_file()
        if settings["tool_parser_plugin"]:
            ToolParserManager.import_tool_parser(settings["tool_parser_plugin"])
        if settings["reasoning_parser_plugin"]:
            ReasoningParserManager.import_reasoning_parser(settings["reasoning_parser_plugin"])
        self._request_type = ChatCompletionRequest
        self._tokenizer = get_tokenizer(
            settings["tokenizer"],
            tokenizer_mode=settings["tokenizer_mode"],
            trust_remote_code=settings["trust_remote_code"],
            revision=settings["revision"],
        )
        self._parser_type: Any = ParserManager.get_parser(
            tool_parser_name=settings["tool_parser"],
            reasoning_parser_name=settings["reasoning_parser"],
            enable_auto_tools=True,
            is_harmony=settings["harmony"],
        )

    def parse(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request of `routes.parse`."""
        token_ids = fields["token_ids"]
        self._new_parser(fields)  # Raises for a request at fault.
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
            try:
                found = self._of_cut(token_ids, fields) if fields["cut"] else self._found(token_ids, fields)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except _TookTooLong:
            return self._unreadable(token_ids, f"the text took longer than {CPU_SECONDS:g} s to parse")
        except Exception as error:  # noqa: BLE001 - a parser may fail in any way on text that a model wrote
            return self._unreadable(token_ids, f"{type(error).__name__}: {error}"[:500])
        if not _is_text(found.calls):
            return self._unreadable(token_ids, "a call holds half a character: a surrogate without its other half")
        # Some parsers give back what they could not read, others swallow it.
        is_incomplete = found.left_out or (not found.calls and found.begun >= 0)
        malformed = "a call was begun, but it is not complete or not in the expected format" if is_incomplete else ""
        return self._answer(found.content, found.reasoning, found.calls, malformed if fields["tools"] else "")

    def _found(self, token_ids: Sequence[int], fields: Mapping[str, Any]) -> _Found:
        request, parser = self._new_parser(fields)
        engine = getattr(parser.tool_parser, "_parser_engine", None)
        ended = EndedCalls(engine) if engine is not None and fields["cut"] else None
        text = self._text(token_ids)
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        answer = text.rpartition(reasoning)[2] if reasoning else text
        begun = max((answer.rfind(mark) for mark in self._marks(parser)), default=-1)
        return _Found(
            text,
            content or "",
            reasoning or "",
            [(call.name, call.arguments) for call in calls or ()],
            begun + len(text) - len(answer) if begun >= 0 else -1,
            engine is not None,
            ended is not None and ended.left_out,
        )

    def _of_cut(self, token_ids: Sequence[int], fields: Mapping[str, Any]) -> _Found:
        """Returns what a text says whose end was cut off, with the calls that are whole and no others."""
        found = self._found(token_ids, fields)
        if not found.calls and found.begun >= 0:
            # Where the last call is not whole, some parsers read none. They read those before it without it.
            before = bisect_right(
                range(len(token_ids)), found.begun, key=lambda count: len(self._text(token_ids[:count]))
            )
            token_ids = token_ids[: before - 1]
            found = self._found(token_ids, fields)
            found.left_out = True
        if not found.by_engine:
            whole = complete_calls(
                found.text, found.calls, len(token_ids), lambda count: self._found(token_ids[:count], fields).calls
            )
            found.left_out = found.left_out or len(whole) < len(found.calls)
            found.calls = whole
        return found

    def _new_parser(self, fields: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns a request and the parser of its answer."""
        request = self._request_type(messages=[{"role": "user", "content": ""}], tools=fields["tools"] or None)
        kwargs = dict(fields.get("template_kwargs") or {})
        return request, self._parser_type(self._tokenizer, request.tools, chat_template_kwargs=kwargs)

    def _text(self, token_ids: Sequence[int]) -> str:
        # Some models' marks are special tokens, which the text must then contain.
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _unreadable(self, token_ids: Sequence[int], malformed: str) -> dict[str, Any]:
        return self._answer(self._text(token_ids), "", [], malformed)

    def _answer(self, content: str, reasoning: str, calls: Calls, malformed: str) -> dict[str, Any]:
        return {
            "content": self._without_special_tokens(content),
            "reasoning": self._without_special_tokens(reasoning),
            "calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
            "malformed": malformed,
        }

    def _without_special_tokens(self, text: str) -> str:
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    @staticmethod
    def _marks(parser: Any) -> set[str]:
        """Returns the strings that open a call, as attributes of the tool parser and its module name them."""
        tool_parser = parser.tool_parser
        if tool_parser is None:
            return set()
        attributes: dict[str, Any] = dict(vars(sys.modules[type(tool_parser).__module__]))
        for cls in reversed(type(tool_parser).__mro__):
            attributes.update(vars(cls))
        attributes.update(vars(tool_parser))
        own = {
            value
            for name, value in attributes.items()
            if isinstance(value, str)
            and ("start" in name.lower() or name == "bot_token")
            and len(value.strip()) > 2
            and not value.strip().isalnum()
        }
        return own | set(_COMMON_MARKS)


def _is_text(calls: Calls) -> bool:
    """Whether an answer can hold them. JSON may name half a character, which UTF-8 cannot write."""
    try:
        orjson.dumps(calls)
    except TypeError:
        return False
    return True


def write_frame(stream: BinaryIO, content: Mapping[str, Any]) -> None:
    """Writes one frame."""
    stream.write(FRAMING.frame(orjson.dumps(content)))
    stream.flush()


def write_answer(stream: BinaryIO, answer: Mapping[str, Any]) -> None:
    """Writes the frame of an answer; of one that is too long, a refusal that says so."""
    try:
        write_frame(stream, answer)
    except BadFrame as error:
        write_frame(stream, {"refused": f"what the parser made of the text is too long: {error}"})


def _on_alarm(signal_number: int, frame: object) -> NoReturn:
    raise _TookTooLong


def main() -> None:
    """Answers frames until standard input ends."""
    # Whatever prints must not end up between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        parser = TextParser(orjson.loads(sys.argv[1]))
    except Exception as error:
        write_frame(answers, {"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
    # Each malformed call would be logged with its traceback, and models write thousands.
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGVTALRM, _on_alarm)
    write_frame(answers, {"ready": True})
    while (body := FRAMING.read(sys.stdin.buffer.read)) is not None:
        try:
            answer = parser.parse(loads(body))
        except Exception as error:  # noqa: BLE001 - a request at fault must not end the process
            answer = {"refused": f"{type(error).__name__}: {error}"[:2000]}
        write_answer(answers, answer)


if __name__ == "__main__":
    main()
