"""One agent's process: in a session of its own, with bounded output, and killed with its whole process group at the end.

It works on any event loop and needs no child watcher: the process is awaited by its descriptor (`pidfd_open`).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
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
_CLOSE_SECONDS = 5.0
"""Longest wait for the end of a killed process."""


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
    """Runs `command` in `directory` to its end; then, or when cancelled, kills what is left of its process group.

    Raises `OSError` if it cannot be started.
    """

    def start() -> subprocess.Popen[bytes]:
        with open(stdin_file, "rb") as given:
            return subprocess.Popen(
                command,
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
        tails.append(await _reading(process.stdout, process))
        tails.append(await _reading(process.stderr, process))
        await _exited(process.pid)
    finally:
        if not starting.done() or starting.exception() is None:
            await _end(await starting, tails)
    output, errors = (tail.text() for tail in tails)
    return AgentResult(process.returncode, output, errors, any(tail.flooded for tail in tails))


async def _end(process: subprocess.Popen[bytes], tails: Sequence[_Tail]) -> None:
    """Kills the process group, collects the process, and closes its output."""
    for tail in tails:
        tail.close()
    # The group first: until the process is collected, its number is nobody else's.
    _kill_group(process)
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await _exited(process.pid)
    except TimeoutError:
        logger.warning("agent process %d does not end after SIGKILL", process.pid)
    process.poll()
    for stream in (process.stdout, process.stderr)[len(tails) :]:
        assert stream is not None
        stream.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nothing of it is left


async def _exited(pid: int) -> None:
    """Waits for the end of a process that is not collected yet."""
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)


async def _reading(stream: Any, process: subprocess.Popen[bytes]) -> _Tail:
    """Begins to read a pipe of the process; the transport closes it."""
    _, tail = await asyncio.get_running_loop().connect_read_pipe(lambda: _Tail(process, stream), stream)
    return tail


class _Tail(asyncio.Protocol):
    """Keeps the end of a process's output, and kills the process if there is too much of it."""

    def __init__(self, process: subprocess.Popen[bytes], stream: Any) -> None:
        self.flooded = False
        self._process = process
        self._stream = stream
        self._kept = bytearray()
        self._received = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.flooded:
            return
        self._kept += data
        del self._kept[:-KEPT_BYTES]
        self._received += len(data)
        if self._received > MOST_OUTPUT_BYTES:
            self.flooded = True
            _kill_group(self._process)

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
