"""Asks `parse_worker`, a process beside the API server, what a completion says: starts it, sends one text at a time, kills it.

The API server's loop only waits. A process that does not answer in time is killed, and the next text starts another.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

import orjson

from counterpoint.inference.plugin.parse_worker import FRAMING
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.process.child import Child, connected

PROGRAM = (sys.executable, "-P", "-m", "counterpoint.inference.plugin.parse_worker")

START_SECONDS = 180.0
"""Deadline for the process to import vLLM and read the tokenizer: 6 s of one core."""

ANSWER_SECONDS = 30.0
"""Deadline for one text. The process itself gives up after a second of CPU time, unless a call into C never returns."""


class ParserFailed(Exception):
    """The process did not start, or did not answer. The message is for a person."""


class ParserRefused(Exception):
    """The request itself is at fault. The message is for a person."""


class ParserProcess:
    """The process with the parsers of `settings`: see `settings_of`. The first `parse` starts it, since few runs need one."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.reads_calls = settings["tool_parser"] is not None
        self.reads_reasoning = settings["reasoning_parser"] is not None
        self._process: tuple[Child, asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def parse(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer: `content`, `reasoning`, `calls` and `malformed`."""
        try:
            request = FRAMING.frame(dumps(fields))
        except BadFrame as error:
            raise ParserRefused(str(error)) from None
        async with self._one_at_a_time:
            answer = await self._exchange(*await self._running(), request, ANSWER_SECONDS)
        if "refused" in answer:
            raise ParserRefused(str(answer["refused"]))
        return answer

    async def _running(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._process is not None and self._process[0].code is None:
            return self._process[1:]
        await self._kill()
        settings = orjson.dumps(dict(self._settings)).decode()
        variables = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": "", "VLLM_PLUGINS": ""}
        self._process = await connected("the process that parses", [*PROGRAM, settings], environment=variables)
        streams = self._process[1:]
        answer = await self._exchange(*streams, b"", START_SECONDS)
        if "error" in answer:
            await self._kill()
            raise ParserFailed(f"the parsers do not load: {answer['error']}")
        return streams

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frame: bytes, seconds: float
    ) -> dict[str, Any]:
        complete = False
        try:
            async with asyncio.timeout(seconds):
                if frame:  # a process that has ended may still have answered
                    writer.write(frame)
                    await writer.drain()
                answer: dict[str, Any] = orjson.loads(await FRAMING.read_from(reader))
            complete = True
            return answer
        except TimeoutError:
            raise ParserFailed(
                f"the process that parses did not answer within {seconds:g} s; it is started anew"
            ) from None
        except BadFrame as error:
            raise ParserFailed(f"the process that parses: {error}; it is started anew") from None
        except (OSError, EOFError):
            raise ParserFailed("the process that parses has ended; it is started anew") from None
        finally:
            if not complete:  # Also if this call is cancelled: the next one must not read this one's answer.
                await asyncio.shield(self._kill())

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process[2].close()
            await process[0].killed()


def settings_of(engine: Any, args: Any) -> dict[str, Any] | None:
    """Returns the settings of the parsers that vLLM was started with; None if it has neither."""
    config = engine.model_config
    tool_parser = args.tool_call_parser if args.enable_auto_tool_choice else None
    reasoning_parser = args.structured_outputs_config.reasoning_parser or None
    if tool_parser is None and reasoning_parser is None:
        return None
    return {
        "tokenizer": config.tokenizer,
        "tokenizer_mode": config.tokenizer_mode,
        "trust_remote_code": config.trust_remote_code,
        "revision": config.tokenizer_revision,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "tool_parser_plugin": args.tool_parser_plugin or "",
        "reasoning_parser_plugin": args.structured_outputs_config.reasoning_parser_plugin or "",
        "harmony": config.hf_config.model_type == "gpt_oss",
    }
