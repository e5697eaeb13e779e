"""One agent's process: with bounded output, below a guard (`agent_guard`) that kills all that it left at its end.

It works on any event loop and needs no child watcher: the guard tells of the agent's end, and is awaited by its descriptor
(`pidfd_open`).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

KEPT_BYTES = 16 * 1024
"""What is kept of each output: its end."""
MOST_OUTPUT_BYTES = 16 * 2**20
"""The size of each output. An agent that writes more is killed."""
_CLOSE_SECONDS = 15.0
"""Longest wait for the guard, which kills what the agent left."""
_GUARD = Path(__file__).with_name("agent_guard.py")


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How an agent ended."""

    exit_code: int
    """Negative: the number of the signal that ended it."""
    output: str
    """The end of its standard output."""
    errors: str
    """The end of its standard error."""
    flooded: bool
    """It was killed because it wrote more than `MOST_OUTPUT_BYTES`."""


async def run_agent(
    command: Sequence[str], environment: Mapping[str, str], directory: Path, stdin_file: Path
) -> AgentResult:
    """Runs `command` in `directory` to its end; then, or when cancelled, kills all that it started, of whatever session.

    Raises `OSError` if it cannot be started.
    """
    (ended, says_ended), (waits, go) = os.pipe(), os.pipe()

    def start() -> subprocess.Popen[bytes]:
        with open(says_ended, "wb"), open(waits, "rb"), open(stdin_file, "rb") as given:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(says_ended), str(waits), *command],
                pass_fds=(says_ended, waits),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=directory,
                env=dict(environment),
                bufsize=0,
                start_new_session=True,
            )

    # The file system may be slow, so in a thread, which a cancellation cannot interrupt.
    starting = asyncio.ensure_future(asyncio.to_thread(start))
    tails: list[_Tail] = []
    try:
        process = await asyncio.shield(starting)
        flooded = asyncio.Event()
        tails.append(await _reading(process.stdout, flooded))
        tails.append(await _reading(process.stderr, flooded))
        code = await _ended(ended, flooded)
    finally:
        try:
            if not starting.done() or starting.exception() is None:
                process = await starting
                for tail in tails:
                    tail.close()
                os.close(go)
                await _end(process, tails)
            else:
                os.close(go)
        finally:
            os.close(ended)
    output, errors = (tail.text() for tail in tails)
    return AgentResult(process.returncode if code is None else code, output, errors, flooded.is_set())


async def _end(process: subprocess.Popen[bytes], tails: Sequence[_Tail]) -> None:
    """Waits for the guard, which kills what is left; collects it, and closes the output that no tail has."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await _readable(os.pidfd_open(process.pid))
    except TimeoutError:
        logger.warning("processes of agent %d do not end after SIGKILL", process.pid)
        process.kill()
        await _readable(os.pidfd_open(process.pid))
    process.poll()
    for stream in (process.stdout, process.stderr)[len(tails) :]:
        assert stream is not None
        stream.close()


async def _ended(ended: int, flooded: asyncio.Event) -> int | None:
    """Waits for the agent's end; returns its exit code. None if the guard was killed, or it has written too much."""
    told, flood = (asyncio.ensure_future(each) for each in (_readable(os.dup(ended)), flooded.wait()))
    try:
        await asyncio.wait({told, flood}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        flood.cancel()
    if not told.done() or told.cancelled():
        return None
    said = os.read(ended, 16)
    return int(said) if said else None


async def _readable(descriptor: int) -> None:
    """Waits until a descriptor can be read, and closes it."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)


async def _reading(stream: Any, flooded: asyncio.Event) -> _Tail:
    """Begins to read a pipe of the process; the transport closes it."""
    _, tail = await asyncio.get_running_loop().connect_read_pipe(lambda: _Tail(flooded, stream), stream)
    return tail


class _Tail(asyncio.Protocol):
    """Keeps the end of a process's output, and says so if there is too much of it."""

    def __init__(self, flooded: asyncio.Event, stream: Any) -> None:
        self._flooded = flooded
        self._stream = stream
        self._kept = bytearray()
        self._received = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._flooded.is_set():
            return
        self._kept += data
        del self._kept[:-KEPT_BYTES]
        self._received += len(data)
        if self._received > MOST_OUTPUT_BYTES:
            self._flooded.set()

    def close(self) -> None:
        """Takes what is written by now, and no more: what a process of the agent writes after its end is not the agent's."""
        if not self._transport.is_closing():
            self._transport.pause_reading()
            written = bytearray(4)
            fcntl.ioctl(self._stream, termios.FIONREAD, written)
            if size := int.from_bytes(written, sys.byteorder):
                self.data_received(os.read(self._stream.fileno(), size))
            self._transport.close()

    def text(self) -> str:
        """The end of the output. Bytes that are not UTF-8 become U+FFFD."""
        return self._kept.decode(errors="replace")
