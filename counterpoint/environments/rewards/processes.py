"""A few processes for work on hostile text, bounded in processor time, in memory and in time, and killed past a bound.

A thread cannot be stopped, and a regular expression or a power tower never lets the event loop run again. So such work is done by
processes (`worker.py`). What a text causes, such as too much processor time, is `OverLimit`; what a machine causes, such as no
answer at all, is `ProcessFailed`. Only the first says something about the text.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from counterpoint.transport.exact_json import dumps, loads
from counterpoint.transport.frames import BadFrame, Framing
from counterpoint.transport.process.child import Child, connected

MAX_FRAME_BYTES = 16 * 2**20
_FRAMING = Framing(MAX_FRAME_BYTES)
_CLOSE_SECONDS = 20.0
_EXIT_SECONDS = 10.0
"""Seconds from the end of a process's stream to its exit."""
_WORKER = Path(__file__).with_name("worker.py")

_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "VIRTUAL_ENV")
"""Variables that a process gets: no keys, no tokens."""

_BY_ITS_WORK = frozenset(
    (signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGXCPU)
)
"""Signals that a process dies of because of what it works on: its limit, or an exhausted stack."""


class OverLimit(Exception):
    """A text needs more processor time, memory or depth than is allowed. The message says which."""


class ProcessFailed(RuntimeError):
    """No answer, for a reason that lies in the machine or the installation."""


class _Worker:
    """One process and our end of its streams."""

    def __init__(self, process: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._reader, self._writer = reader, writer

    async def exchange(self, request: bytes) -> bytes:
        """Sends a request and returns the answer. Raises `EOFError` if the process ends instead."""
        try:
            self._writer.write(_FRAMING.frame(request))
            await self._writer.drain()
            return await _FRAMING.read_from(self._reader)
        except BadFrame as error:
            raise ProcessFailed(f"a process for rewards: {error}") from None
        except ConnectionError as error:
            raise EOFError from error

    async def end(self, patience: float) -> int | None:
        """Waits up to `patience` seconds for the process, then kills it; returns its exit code."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.ended(), patience)
        self._writer.close()
        return await self.process.killed()


class BoundedProcesses:
    """Has at most `count` processes, each started when first needed and again after it was killed."""

    def __init__(self, count: int = 2, memory_bytes: int = 2 * 2**30, *, keeps_environment: bool = False) -> None:
        """Starts none yet.

        With `keeps_environment` a process has all of this one's environment variables and its module path, which an operator's
        own function may need.
        """
        self._slots = asyncio.Semaphore(count)
        self._memory_bytes = memory_bytes
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._is_closed = False
        self._ending: set[asyncio.Task[int | None]] = set()
        if keeps_environment:
            self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        else:
            self._environment = {name: os.environ[name] for name in _KEPT if name in os.environ}

    async def run(self, task: str, arguments: dict[str, Any], *, cpu_seconds: float, seconds: float) -> dict[str, Any]:
        """Returns the answer to a task of `worker.py`. `seconds` do not include the wait for a free process.

        Raises `OverLimit`, `ProcessFailed`, and `ValueError` for arguments that are no JSON or too large.
        """
        frame = _encode({"task": task, "arguments": arguments, "cpu_seconds": cpu_seconds})
        async with self._slots:
            for _ in range(2):  # the kernel may kill a process that did nothing wrong when memory is short
                answer = await self._ask(frame, cpu_seconds, seconds)
                if answer is not None:
                    return _checked(loads(answer))
        raise ProcessFailed(
            "a process for rewards was killed (SIGKILL) twice at one task; is the machine short of memory?"
        )

    async def close(self) -> None:
        """Ends all processes. A task that still runs then fails."""
        self._is_closed = True
        for worker in list(self._workers):
            self._end(worker)
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSE_SECONDS)

    async def _ask(self, frame: bytes, cpu_seconds: float, seconds: float) -> bytes | None:
        """Returns the answer; None if the process was killed from outside."""
        worker = self._idle.pop() if self._idle else await self._start()
        try:
            async with asyncio.timeout(seconds):
                answer = await worker.exchange(frame)
        except TimeoutError:
            self._end(worker)
            raise ProcessFailed(
                f"no answer from a process for rewards within {seconds:g} s; is the machine overloaded?"
            ) from None
        except EOFError:
            # Shielded: a cancelled rollout must not leave a process behind.
            _explain(await asyncio.shield(self._end(worker, _EXIT_SECONDS)), cpu_seconds)
            return None
        except BaseException:
            self._end(worker)  # its answer would be taken for that of the next task
            raise
        if worker in self._workers:
            self._idle.append(worker)
        return answer

    async def _start(self) -> _Worker:
        if self._is_closed:
            raise ProcessFailed("the processes for rewards are closed")
        command = [sys.executable, "-P", str(_WORKER), str(os.getpid()), str(self._memory_bytes)]
        how = {"environment": self._environment, "stderr": DEVNULL, "guarded": False}
        worker = _Worker(*await connected("a process for rewards", command, **how))
        self._workers.add(worker)
        if self._is_closed:  # meanwhile
            self._end(worker)
        return worker

    def _end(self, worker: _Worker, patience: float = 0.0) -> asyncio.Task[int | None]:
        self._workers.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        task = asyncio.create_task(worker.end(patience), name="end a process for rewards")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


def _explain(code: int | None, cpu_seconds: float) -> None:
    """Raises for the exit code of a process that ended instead of answering, unless it was killed from outside."""
    number = (code or 0) - 128
    if number in _BY_ITS_WORK:
        limit = f"{cpu_seconds:g} s of processor time" if number == signal.SIGPROF else signal.Signals(number).name
        raise OverLimit(f"ended by {limit}")
    if number != signal.SIGKILL:
        raise ProcessFailed(f"a process for rewards ended with exit code {code} ({sys.executable} {_WORKER})")


def _encode(request: dict[str, Any]) -> bytes:
    try:
        frame = dumps(request)
    except TypeError as error:
        raise ValueError(f"this is no JSON, which a process for rewards is given: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(frame)} bytes for a process for rewards; expected at most {MAX_FRAME_BYTES}")
    return frame


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "over_limit" in answer:
        raise OverLimit(f"ended by the limit of {answer['over_limit']}")
    if (missing := answer.get("missing")) is not None:
        extra = '; pip install "counterpoint[math-verify]"' if missing == "math_verify" else ""
        raise ProcessFailed(f"a process for rewards lacks the module {missing!r}{extra}")
    return answer
