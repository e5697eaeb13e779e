"""One agent's process: with bounded output, below a guard (`agent_guard`) that kills all that it left at its end.

It works on any event loop and needs no child watcher: the guard tells of the agent's end, and of its own by the end of a pipe.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from counterpoint.transport.process.child import Child

logger = logging.getLogger(__name__)

KEPT_BYTES = 16 * 1024
"""What is kept of each output: its end."""
MOST_OUTPUT_BYTES = 16 * 2**20
"""The size of each output. An agent that writes more is killed."""
_CLOSE_SECONDS = 15.0
"""Longest wait for the guard, which kills what the agent left."""
_MOST_SAID_BYTES = 64
"""What the guard writes at its end: two numbers."""
_GUARD = Path(__file__).with_name("agent_guard.py")

Start = Callable[[Sequence[int]], "Child | None"]
"""Starts a guard, which gets these descriptors: the agent's standard input, output and errors, and its own `ENDED` and `GO`.

Returns the guard, if it is a child of this process. Runs in a thread."""


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


class Running:
    """An agent below its guard, and what is known of it."""

    def __init__(self, closed_with: ExitStack) -> None:
        self.over = asyncio.Event()
        """Set once the agent has ended, its guard has, or it has written too much."""
        self.guard, self.output, self.errors = _Guard(self.over), _Tail(self.over), _Tail(self.over)
        for pipe in (self.guard, self.output, self.errors):
            closed_with.enter_context(closing(pipe))

    def result(self) -> AgentResult:
        """How the agent ended; call it after the end."""
        code = self.guard.number(1)
        flooded = any(tail.received > MOST_OUTPUT_BYTES for tail in (self.output, self.errors))
        return AgentResult(-signal.SIGKILL if code is None else code, self.output.text(), self.errors.text(), flooded)


def started(
    command: Sequence[str], environment: Mapping[str, str], directory: Path, pass_fds: Sequence[int] = ()
) -> Start:
    """Returns what starts `command` in `directory` below a guard. It inherits `pass_fds` beside its streams."""

    def start(descriptors: Sequence[int]) -> Child:
        given, output, errors, ended, go = descriptors
        guard = [sys.executable, "-I", "-S", str(_GUARD), str(ended), str(go), *command]
        return Child(
            "the guard of an agent", guard, environment=environment, directory=directory, stdin=given, stdout=output,
            stderr=errors, pass_fds=(ended, go, *pass_fds), guarded=False,
        )  # fmt: skip

    return start


async def run_agent(start: Start, stdin_file: Path) -> AgentResult:
    """Runs an agent to its end; then, or when cancelled, kills all that it started, of whatever session.

    Raises `OSError` if it cannot be started.
    """
    async with running(start, stdin_file) as agent:
        await agent.over.wait()
    return agent.result()


@asynccontextmanager
async def running(start: Start, stdin_file: Path) -> AsyncIterator[Running]:
    """Runs an agent for the block, and kills all that it started at its end. Raises `OSError` if it cannot be started."""
    with ExitStack() as pipes:
        waits, go = (pipes.enter_context(end) for end in _pipe())
        agent = Running(pipes)

        def begin() -> Child | None:
            ends = (agent.output.theirs, agent.errors.theirs, agent.guard.theirs, waits)
            with ExitStack() as passed:
                given = passed.enter_context(open(stdin_file, "rb"))
                return start([given.fileno(), *(passed.enter_context(end).fileno() for end in ends)])

        await agent.guard.listen()
        # The file system may be slow, so in a thread, which a cancellation cannot interrupt.
        starting = asyncio.ensure_future(asyncio.to_thread(begin))
        try:
            await asyncio.shield(starting)
            await agent.output.listen()
            await agent.errors.listen()
            yield agent
        finally:
            process = await starting
            agent.output.close()
            agent.errors.close()
            go.close()
            await _end(process, agent.guard)


async def _end(process: Child | None, guard: _Guard) -> None:
    """Waits for the guard, which kills what is left, and collects it."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await guard.gone.wait()
    except TimeoutError:
        pid = guard.number(0) if process is None else process.pid
        logger.warning("processes of agent %s do not end after SIGKILL", pid)
        if pid is None:  # a template that hangs: whenever it forks a guard, that ends at once
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await guard.gone.wait()
    if process is not None:
        await asyncio.to_thread(process.wait)


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    ours, theirs = os.pipe()
    return open(ours, "rb", buffering=0), open(theirs, "wb", buffering=0)


class _Pipe(asyncio.Protocol):
    """A pipe from which we read."""

    def __init__(self, over: asyncio.Event) -> None:
        self._over = over
        self.stream, self.theirs = _pipe()
        self.transport: Any = None

    async def listen(self) -> None:
        """Begins to read."""
        await asyncio.get_running_loop().connect_read_pipe(lambda: self, self.stream)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def close(self) -> None:
        """Closes both ends; the transport closes ours if there is one."""
        self.theirs.close()
        (self.transport or self.stream).close()


class _Guard(_Pipe):
    """What a guard says: its process id, then the exit code of its agent."""

    def __init__(self, over: asyncio.Event) -> None:
        super().__init__(over)
        self.gone = asyncio.Event()
        """Set once the guard has ended, or was never started."""
        self._said = b""

    def data_received(self, data: bytes) -> None:
        self._said = (self._said + data)[:_MOST_SAID_BYTES]
        if self._said.count(b"\n") > 1:
            self._over.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._over.set()
        self.gone.set()

    def number(self, line: int) -> int | None:
        """The number in a line, if it was said. Only a hostile agent says anything else."""
        lines = self._said.split(b"\n")[:-1]
        with suppress(IndexError, ValueError):
            return int(lines[line])
        return None


class _Tail(_Pipe):
    """Keeps the end of a process's output, and says so if there is too much of it."""

    def __init__(self, over: asyncio.Event) -> None:
        super().__init__(over)
        self._kept = bytearray()
        self.received = 0

    def data_received(self, data: bytes) -> None:
        if self.received > MOST_OUTPUT_BYTES:
            return
        self._kept += data
        del self._kept[:-KEPT_BYTES]
        self.received += len(data)
        if self.received > MOST_OUTPUT_BYTES:
            self._over.set()

    def close(self) -> None:
        """Takes what is written by now, and no more: what a process of the agent writes after its end is not the agent's."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
            written = bytearray(4)
            fcntl.ioctl(self.stream, termios.FIONREAD, written)
            if size := int.from_bytes(written, sys.byteorder):
                self.data_received(os.read(self.stream.fileno(), size))
        super().close()

    def text(self) -> str:
        """The end of the output. Bytes that are not UTF-8 become U+FFFD."""
        return self._kept.decode(errors="replace")
