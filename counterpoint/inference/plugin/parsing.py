"""Asks `parse_worker`, a process beside the API server, what a completion says: starts it, sends one text at a time, kills it.

The API server's loop only waits. A process that does not answer in time is killed, and the next text starts another.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson

from counterpoint.inference.plugin.parse_worker import FRAMING
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.process.parent_death import bound_command

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
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()

    async def parse(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer: `content`, `reasoning`, `calls` and `malformed`."""
        try:
            request = FRAMING.frame(dumps(fields))
        except BadFrame as error:
            raise ParserRefused(str(error)) from None
        async with self._one_at_a_time:
            process = await self._running()
            answer = await self._exchange(process, request, ANSWER_SECONDS)
        if "refused" in answer:
            raise ParserRefused(str(answer["refused"]))
        return answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        command = bound_command([sys.executable, "-P", "-m", "counterpoint.inference.plugin.parse_worker"])
        self._process = await asyncio.create_subprocess_exec(
            *command,
            orjson.dumps(dict(self._settings)).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": "", "VLLM_PLUGINS": ""},
        )
        answer = await self._exchange(self._process, b"", START_SECONDS)
        if "error" in answer:
            await self._kill()
            raise ParserFailed(f"the parsers do not load: {answer['error']}")
        return self._process

    async def _exchange(self, process: asyncio.subprocess.Process, frame: bytes, seconds: float) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        complete = False
        try:
            async with asyncio.timeout(seconds):
                if frame:  # a process that has ended may still have answered
                    process.stdin.write(frame)
                    await process.stdin.drain()
                answer: dict[str, Any] = orjson.loads(await FRAMING.read_from(process.stdout))
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
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


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
