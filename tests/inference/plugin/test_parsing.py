"""The process that parses: it is asked one text at a time, and killed and started anew when it dies, hangs or talks nonsense."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from counterpoint.inference.plugin import parsing
from counterpoint.inference.plugin.parse_worker import FRAMING, MAX_FRAME_BYTES, TextParser, write_answer, write_frame
from counterpoint.inference.plugin.parsing import ParserFailed, ParserProcess, ParserRefused, settings_of
from counterpoint.transport.process.child import connected

pytestmark = pytest.mark.slow

# Speaks the frames of the real one without vLLM, and does what the request says.
STUB = """
import json, os, struct, sys, time
out = sys.stdout.buffer
def say(content):
    body = json.dumps(content).encode()
    out.write(struct.pack("<I", len(body)) + body); out.flush()
settings = json.loads(sys.argv[1])
if "error" in settings:
    say({"error": settings["error"]}); sys.exit(1)
say({"ready": True})
while head := sys.stdin.buffer.read(4):
    asked = json.loads(sys.stdin.buffer.read(*struct.unpack("<I", head)))
    if asked["do"] == "die": os._exit(3)
    if asked["do"] == "hang": time.sleep(1000)
    if asked["do"] == "flood": out.write(b"\\xff" * 8); out.flush(); time.sleep(1000)
    say({"refused": "no"} if asked["do"] == "refuse" else {"content": asked["do"], "pid": os.getpid()})
"""


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "PROGRAM", (sys.executable, "-c", STUB))


@pytest.fixture
async def parser() -> AsyncIterator[ParserProcess]:
    made = ParserProcess({"tool_parser": "hermes", "reasoning_parser": None})
    yield made
    await made._kill()


async def test_texts_are_answered_in_order_by_one_process(parser: ParserProcess) -> None:
    answers = await asyncio.gather(*(parser.parse({"do": str(number)}) for number in range(20)))
    assert [answer["content"] for answer in answers] == [str(number) for number in range(20)]
    assert len({answer["pid"] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("what", "said"), [("die", "has ended"), ("hang", "did not answer within"), ("flood", "announced")]
)
async def test_a_process_that_fails_is_started_anew(
    parser: ParserProcess, what: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await parser.parse({"do": "a"}))["content"] == "a"
    monkeypatch.setattr(parsing, "ANSWER_SECONDS", 0.2 if what == "hang" else 60.0)
    with pytest.raises(ParserFailed, match=said):
        await parser.parse({"do": what})
    monkeypatch.setattr(parsing, "ANSWER_SECONDS", 60.0)
    assert (await parser.parse({"do": "b"}))["content"] == "b"


async def test_a_cancelled_call_leaves_no_answer_for_the_next(parser: ParserProcess) -> None:
    await parser.parse({"do": "a"})
    hung = asyncio.create_task(parser.parse({"do": "hang"}))
    await asyncio.sleep(0)
    assert parser._one_at_a_time.locked()
    hung.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hung
    assert (await parser.parse({"do": "b"}))["content"] == "b"


async def test_a_refused_request_and_parsers_that_do_not_load(parser: ParserProcess) -> None:
    with pytest.raises(ParserRefused, match="no"):
        await parser.parse({"do": "refuse"})
    with pytest.raises(ParserFailed, match="do not load: KeyError: 'hammer'"):
        await ParserProcess({"tool_parser": "hammer", "reasoning_parser": None, "error": "KeyError: 'hammer'"}).parse(
            {"do": "a"}
        )


async def test_parsers_that_do_not_load_say_why_though_their_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def started_and_ended(*command: Any, **options: Any) -> Any:
        started = await connected(*command, **options)
        await started[0].ended()
        return started

    monkeypatch.setattr(parsing, "connected", started_and_ended)
    with pytest.raises(ParserFailed, match="do not load: KeyError: 'hammer'"):
        await ParserProcess({"tool_parser": "hammer", "reasoning_parser": None, "error": "KeyError: 'hammer'"}).parse(
            {"do": "a"}
        )


def test_a_call_that_holds_half_a_character_is_malformed_and_the_process_lives() -> None:
    found = SimpleNamespace(name="keep", arguments='{"text": "\ud800"}')

    class Parsing:
        tool_parser = None

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def parse(self, *_: Any, **__: Any) -> Any:
            return None, None, [found]

    parser = TextParser.__new__(TextParser)
    parser._tokenizer = SimpleNamespace(decode=lambda *_, **__: "a text", all_special_tokens=[])
    parser._parser_type = Parsing
    parser._request_type = lambda **_: SimpleNamespace(tools=None)
    answer = parser.parse({"tools": [], "token_ids": [1], "cut": False})
    assert (answer["content"], answer["calls"]) == ("a text", [])
    assert "half a character" in answer["malformed"]
    write_frame(io.BytesIO(), answer)


def arguments(tool_parser: str | None, reasoning_parser: str = "", auto: bool = True) -> Any:
    structured = SimpleNamespace(reasoning_parser=reasoning_parser, reasoning_parser_plugin="")
    return SimpleNamespace(
        enable_auto_tool_choice=auto,
        tool_call_parser=tool_parser,
        tool_parser_plugin="",
        structured_outputs_config=structured,
    )


def test_an_answer_that_is_too_long_is_a_refusal() -> None:
    written = io.BytesIO()
    write_answer(written, {"content": "a" * MAX_FRAME_BYTES})
    written.seek(0)
    body = FRAMING.read(written.read)
    assert body is not None
    assert "too long" in orjson.loads(body)["refused"]


def test_the_settings_are_those_of_the_command_line() -> None:
    model = SimpleNamespace(
        tokenizer="there",
        tokenizer_mode="auto",
        trust_remote_code=False,
        tokenizer_revision=None,
        hf_config=SimpleNamespace(model_type="qwen3"),
    )
    engine = SimpleNamespace(model_config=model)
    assert settings_of(engine, arguments(None)) is None
    assert settings_of(engine, arguments("hermes", auto=False)) is None
    settings = settings_of(engine, arguments("hermes", "qwen3"))
    assert settings is not None
    assert (settings["tool_parser"], settings["reasoning_parser"], settings["harmony"]) == ("hermes", "qwen3", False)
    assert not ParserProcess(settings_of(engine, arguments(None, "qwen3")) or {}).reads_calls


def test_the_marks_of_a_parser_are_found_in_its_attributes() -> None:
    class OfItsOwn:
        tool_calls_start_token = "<|calls|>"
        name = "start"
        started = "yes"

    marks = TextParser._marks(SimpleNamespace(tool_parser=OfItsOwn()))
    assert {"<|calls|>", "<tool_call>"} <= marks
    assert "yes" not in marks
    assert TextParser._marks(SimpleNamespace(tool_parser=None)) == set()
