"""Serves one run of the sandbox: reads the request, forks the process that runs the code, watches it, and answers.

It is forked from the zygote and is trusted; the process that it forks is not. It kills that process at the deadline, when its
output grows too long, and when the one who asked is gone.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from counterpoint.environments.sandbox import confined, namespaces
from counterpoint.transport.frames import Framing

REQUESTS = Framing(1 << 24)
ANSWERS = Framing((1 << 32) - 1)
"""The operator's limit on a program's output bounds an answer; its frame bounds nothing more."""
REQUEST_SECONDS = 30.0
READ_BYTES = 1 << 16
LOOK_SECONDS = 0.25
"""How often to look at a process's own time, since threads may take it faster than the clock's goes on."""
DRAIN_SECONDS = 5.0
"""How long to read what a process that has ended wrote."""


def supervise(call: socket.socket, settings: Mapping[str, Any]) -> confined.Program:
    """Serves the run that is asked for by `call`, and ends this process; returns only in the one that it forks."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        namespaces.set_process_option(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
        call.settimeout(REQUEST_SECONDS)
        if (asked := REQUESTS.read(call.recv)) is None:
            os._exit(0)
        request = json.loads(asked)
        try:
            answer = _run(call, request, settings)
        except OSError as error:
            answer = {"refused": f"the sandbox could not be set up: {error}"}
        if isinstance(answer, tuple):
            return answer
        with suppress(OSError):  # the caller is gone
            call.sendall(ANSWERS.frame(json.dumps(answer).encode()))
    except BaseException:  # noqa: BLE001 - only the program's process returns
        os._exit(1)
    os._exit(0)


@dataclass
class _Streams:
    """Our ends of the process's standard streams."""

    stdin: int
    stdout: int
    stderr: int
    to_write: memoryview
    output: dict[int, bytearray] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.output = {self.stdout: bytearray(), self.stderr: bytearray()}
        self.open = set(self.output)
        os.set_blocking(self.stdin, False)
        for descriptor in self.output:
            os.set_blocking(descriptor, False)

    def write(self) -> None:
        """Writes more of the standard input; closes it at the end, or if nobody reads it."""
        try:
            if self.to_write:
                self.to_write = self.to_write[os.write(self.stdin, self.to_write[:READ_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:
            self.to_write = self.to_write[:0]
        if not self.to_write:
            os.close(self.stdin)
            self.stdin = -1

    def read(self, descriptor: int) -> int:
        """Reads once; returns how many bytes came."""
        try:
            chunk = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return 0
        if not chunk:
            self.open.discard(descriptor)
        self.output[descriptor] += chunk
        return len(chunk)


def _run(
    call: socket.socket, request: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any] | confined.Program:
    isolated = bool(settings["namespaces"])
    directory = "/tmp" if isolated else tempfile.mkdtemp(prefix="sandbox-")
    if isolated:
        # Sockets, queues and shared memory, by which runs could meet in the zygote's other namespaces, are refused to them.
        namespaces.unshare(namespaces.CLONE_NEWNS | namespaces.CLONE_NEWPID, "mount, pid")
    stdin, stdin_end = os.pipe()
    (stdout_end, stdout), (stderr_end, stderr) = (
        confined.named_pipe(name) if isolated else os.pipe() for name in confined.STREAMS[1:]
    )
    trouble_end, trouble = os.pipe()
    pid = os.fork()
    if pid == 0:
        call.close()
        return confined.prepare(request, settings, directory, (stdin, stdout, stderr, trouble))
    for descriptor in (stdin, stdout, stderr, trouble):
        os.close(descriptor)
    try:
        if said := os.read(trouble_end, READ_BYTES):  # It ends without a word when the process is confined.
            os.waitpid(pid, 0)
            return {"refused": said.decode(errors="replace")}
        streams = _Streams(stdin_end, stdout_end, stderr_end, memoryview(request["stdin"].encode()))
        return _watch(call, pid, streams, request, settings)
    finally:
        if not isolated:
            shutil.rmtree(directory, ignore_errors=True)


def _watch(
    call: socket.socket, pid: int, streams: _Streams, request: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Passes the streams on until the process ends or has to be killed."""
    began = time.monotonic()
    seconds, cpu_seconds = request["seconds"], request["cpu_seconds"]
    killed = ""
    isolated, limit = bool(settings["namespaces"]), int(settings["output_bytes"])
    ended = os.pidfd_open(pid)
    try:
        while not killed:
            left = began + seconds - time.monotonic()
            cpu_left = cpu_seconds - time.clock_gettime(_cpu_clock(pid))
            readable, writable, _ = select.select(
                [ended, call.fileno(), *streams.open],
                [streams.stdin] if streams.stdin >= 0 else [],
                [],
                max(min(left, cpu_left, LOOK_SECONDS), 0),
            )
            if writable:
                streams.write()
            for descriptor in streams.open & set(readable):
                streams.read(descriptor)
            if any(len(output) > limit for output in streams.output.values()):
                killed = "output"
            elif call.fileno() in readable:  # Nothing more is sent: it has been closed.
                killed = "abandoned"
            elif ended in readable:
                break
            elif left <= 0 or cpu_left <= 0:
                killed = "deadline"
    finally:
        with suppress(ProcessLookupError):
            # Without namespaces its group is all that can be killed with it.
            (os.kill if isolated else os.killpg)(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    took = time.monotonic() - began
    _drain(streams, limit)
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and not killed:
        number = -code
        cpu = number in (signal.SIGXCPU, signal.SIGKILL) and took >= seconds
        killed = "deadline" if cpu else f"signal {number} ({signal.strsignal(number)})"
    return {
        "stdout": _text(streams.output[streams.stdout], limit),
        "stderr": _text(streams.output[streams.stderr], limit),
        "exit_code": None if killed else code,
        "killed": killed,
        "seconds": took,
    }


def _cpu_clock(pid: int) -> int:
    """Returns the clock of a process's own time, as `clock_getcpuclockid` of the C library makes it."""
    return (~pid << 3) | 2


def _drain(streams: _Streams, limit: int) -> None:
    until = time.monotonic() + DRAIN_SECONDS
    while streams.open and time.monotonic() < until:
        readable, _, _ = select.select(list(streams.open), [], [], DRAIN_SECONDS)
        for descriptor in readable:
            streams.read(descriptor)
            if len(streams.output[descriptor]) > limit:
                streams.open.discard(descriptor)


def _text(output: bytearray, limit: int) -> str:
    return bytes(output[:limit]).decode(errors="replace")
