"""A child of this process: what it inherits, how its output goes to a file, what it answers or reports, and how it is ended.

Most children run below a guardian (`transport/process/launch.py`:`guarded`), whose exit code is theirs; a guardian passes SIGTERM
on, and upon SIGHUP it kills all that is below it. A guardian that was killed itself would leave what its command had started.

What starts a process starts a `Child`, or `run`s one to its end; `tests/test_child_processes.py` names the exceptions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO, Any, NamedTuple, Self

from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular
from counterpoint.transport.process import launch
from counterpoint.transport.process.launch import SYSTEMD_VARIABLES
from counterpoint.transport.process.notify import NotifySocket

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.1
"""Seconds after which a guardian is told to kill once more: where SIGHUP is ignored, as below `nohup`, one that was
just started may not have heard it."""

KILL_SECONDS = 20.0
"""How long a child may take to end once it is killed. A guardian gives up before; else it hangs in the kernel."""

MOST_OUTPUT = 1 << 26
"""Bytes that a command which is run to its end may write for its parent."""

KEPT_ERRORS = 1 << 16
"""What is kept of its errors: their last bytes."""

LONGEST_LINE = 1 << 20
"""Bytes of a line that a child writes for its parent."""

LOOK_SECONDS = 0.2
"""How often who waits for a child's line looks whether the wait is given up."""

MOST_AT_ONCE = 1000
"""Notifications that are read before others have their turn: a worker may send them faster than they are read."""

_RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)


def own_environment() -> dict[str, str]:
    """Returns this process's environment without what concerns itself alone: for a child without a guardian."""
    return {name: value for name, value in os.environ.items() if name not in SYSTEMD_VARIABLES}


def spawn(
    command: Sequence[str],
    log_file: Path,
    environment: Mapping[str, str],
    *,
    standard_input: int | None = None,
    inherited: Mapping[int, int] | None = None,
    session: bool = False,
    mode: int = 0o644,
) -> int:
    """Starts `command` by `posix_spawn`; returns its pid.

    Its output is appended to `log_file`. It has a process group of its own, or with `session` a session, so that a Ctrl-C on
    the terminal reaches only this process. `inherited` has the numbers that it finds descriptors of this process under; without
    `standard_input` that is empty. Raises `OSError` when the log cannot be opened, or the system lacks memory, processes or
    descriptors; then nothing is left of the attempt.
    """
    group: dict[str, Any] = {"setsid": True} if session else {"setpgroup": 0}
    empty = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    return os.posix_spawn(
        command[0],
        list(command),
        environment,
        file_actions=[
            *((os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in (inherited or {}).items()),
            empty if standard_input is None else (os.POSIX_SPAWN_DUP2, standard_input, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log_file), os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsigmask=(),
        setsigdef=_RESET,
        **group,
    )


class ChildError(Exception):
    """A child did not do what was due. The message names it and says why."""


class Child:
    """A started child. Start it from a thread that outlives it: the kernel ties its guardian's life to that thread.

    It has a process group of its own, so that Ctrl-C on the terminal reaches only this process. As a context manager it is killed
    at the end of the block.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        given: bytes | None = None,
        stdin: int = DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        log: Path | None = None,
        pass_fds: Sequence[int] = (),
        nice: int = 0,
        guarded: bool = True,
        notifies: bool = False,
    ) -> None:
        """Starts it.

        Args:
            name: What messages call it: "the process of the consumer".
            command: The program and its arguments.
            environment: All its variables; this process's unless given. Those of systemd are left out.
            directory: Where it runs; in this process's unless given.
            given: The content of its standard input.
            stdin: A descriptor, or `PIPE`.
            stdout: A descriptor, or `PIPE`; this process's unless given.
            stderr: As `stdout`.
            log: The file to which both are appended instead.
            pass_fds: Descriptors that it inherits under their numbers.
            nice: Added to its niceness.
            guarded: It runs below a guardian: it ends with this process, and nothing that it started is left. Without, it has a
                session of its own, and outlives this process.
            notifies: It has an address for systemd's notifications, at which `is_ready` hears it.

        Raises:
            OSError: The log cannot be opened, or the system lacks memory, processes or descriptors; then nothing is left.
        """
        self.name = name
        self.log = log
        self._log_from = 0 if log is None else size_of(log)
        self._guarded = guarded
        self._notifications = NotifySocket() if notifies else None
        self._was_ready = False
        own = os.environ if environment is None else environment
        variables = {name: value for name, value in own.items() if name not in SYSTEMD_VARIABLES}
        if self._notifications is not None:
            variables["NOTIFY_SOCKET"] = self._notifications.address
        with ExitStack() as failed, ExitStack() as opened:
            if self._notifications is not None:
                failed.callback(self._notifications.close)
            if given is not None:
                stdin = os.memfd_create("given")
                opened.callback(os.close, stdin)
                with open(stdin, "wb", closefd=False) as file:
                    file.write(given)
                os.lseek(stdin, 0, os.SEEK_SET)
            if log is not None:
                stdout = stderr = opened.enter_context(log.open("ab")).fileno()
            self._process = subprocess.Popen(
                launch.guarded(command, nice, notifies=notifies) if guarded else command,
                bufsize=0,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                cwd=directory,
                env=variables,
                process_group=0 if guarded else None,
                start_new_session=not guarded,
            )
            failed.pop_all()
        self.pid = self._process.pid
        """That of its guardian, if it has one."""

    @property
    def stdin(self) -> IO[bytes]:
        """Our end of its standard input."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Our end of its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def code(self) -> int | None:
        """Its exit code, 128 + the signal for one that was killed; None while it runs."""
        code = self._process.poll()
        if self._guarded and code == -signal.SIGHUP:  # it was killed when its guardian had just begun
            return 128 + signal.SIGKILL
        return 128 - code if code is not None and code < 0 else code

    def ready(self, seconds: float) -> bytes:
        """Waits for the line by which it reports, at the pipe of its output, that it is ready; returns it, with its end.

        What comes later is read by a thread, so that it never blocks the child. Raises `ChildError`, as `line`.
        """
        line = self.line(seconds)
        rest = os.dup(self.stdout.fileno())
        threading.Thread(target=_drain, args=(rest,), name=f"output of {self.name}", daemon=True).start()
        return line

    @property
    def is_ready(self) -> bool:
        """Whether it has sent `READY=1`. Ask often: it reads the notifications, or many of them, and does not wait."""
        assert self._notifications is not None
        for _ in range(MOST_AT_ONCE):
            if (message := self._notifications.receive()) is None:
                break
            self._was_ready |= message.get("READY") == "1"
        return self._was_ready

    def line(self, seconds: float, is_given_up: Callable[[], bool] = lambda: False) -> bytes:
        """Waits for the next line at the pipe of its output; returns it, with its end. Lines written together come together.

        Raises `ChildError` after `seconds`, also if a part has come; soon after `is_given_up` returns true; if the child ends
        before; and if the line is longer than `LONGEST_LINE`. It does not end the child.
        """
        received, deadline = bytearray(), time.monotonic() + seconds
        poll = select.poll()  # `select.select` refuses descriptors above 1,023
        poll.register(self.stdout, select.POLLIN)
        while b"\n" not in received:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChildError(f"{self.name} wrote no line within {seconds:g} s")
            if is_given_up():
                raise ChildError(f"{self.name} is being stopped")
            if not poll.poll(1000 * min(left, LOOK_SECONDS)):
                continue
            data = os.read(self.stdout.fileno(), LONGEST_LINE)
            if not data:
                with suppress(TimeoutError):
                    raise ChildError(
                        f"{self.name} ended with exit code {self.wait(max(0.0, deadline - time.monotonic()))}"
                    )
                raise ChildError(f"{self.name} closed its output")
            received += data
            if len(received) > LONGEST_LINE:
                raise ChildError(f"{self.name} wrote more than {LONGEST_LINE} bytes")
        return bytes(received)

    def last_lines(self, count: int) -> list[str]:
        """Returns the last lines that it wrote to its log."""
        assert self.log is not None
        return last_lines(self.log, count, self._log_from)

    def wait(self, seconds: float | None = None) -> int:
        """Waits for its end; returns its exit code. Raises `TimeoutError`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if (code := self.code) is None:
            raise TimeoutError(f"{self.name} did not end within {seconds:g} s")
        return code

    def signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended; a guardian passes SIGTERM and SIGINT on."""
        self._process.send_signal(number)

    def stop(self, seconds: float) -> bool:
        """Asks it to end (SIGTERM), and kills it and all below it after `seconds`; returns whether it ended by itself."""
        self.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            self.wait(seconds)
            return True
        self.kill()
        return False

    def kill_soon(self) -> None:
        """Has it killed, with everything below it; without a guardian, with its process group.

        A guardian that was just started may not hear it yet.
        """
        if self._guarded:
            for number in (signal.SIGHUP, signal.SIGCONT):  # a guardian may have been stopped with its command
                self.signal(number)
        elif self.code is None:
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kills it with everything below it, and waits for its end."""
        for _ in self._kills():
            with suppress(TimeoutError):
                self.wait(AGAIN_SECONDS)

    def _kills(self) -> Iterator[None]:
        """Yields whenever it was killed once more, until it has ended, or does not end."""
        deadline = time.monotonic() + KILL_SECONDS
        while self.code is None:
            if time.monotonic() > deadline:
                return logger.error("%s (process %d) does not end though it was killed", self.name, self.pid)
            self.kill_soon()
            yield

    def close(self) -> None:
        """Kills what still runs, and closes its pipes."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr, self._notifications):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def ended(self) -> int:
        """Waits for its end on the running loop; returns its exit code. Any number may wait."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        with suppress(ProcessLookupError):  # a thread has just waited for it
            while self.code is None:
                handle = os.pidfd_open(self.pid)
                loop.add_reader(handle, over.set)
                try:
                    await over.wait()
                finally:
                    loop.remove_reader(handle)
                    os.close(handle)
        return self.wait()

    async def stopped(self, seconds: float) -> int | None:
        """Does as `stop` on the running loop; returns the exit code, as `killed`."""
        self.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            return await asyncio.wait_for(self.ended(), seconds)
        return await self.killed()

    async def killed(self) -> int | None:
        """Does as `kill` on the running loop; returns the exit code, None if it does not end."""
        for _ in self._kills():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended(), AGAIN_SECONDS)
        return self.code


async def connected(name: str, command: Sequence[str], **how: Any) -> tuple[Child, StreamReader, StreamWriter]:
    """Starts a child whose standard input and output are one socket; returns it with the streams at the other end.

    The arguments and errors are those of `Child`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            return Child(name, command, stdin=theirs.fileno(), stdout=theirs.fileno(), **how), reader, writer
        except OSError:
            writer.close()
            raise


def _drain(descriptor: int) -> None:
    """Reads what nobody wants, and closes the descriptor."""
    with suppress(OSError):
        while os.read(descriptor, LONGEST_LINE):
            pass
    os.close(descriptor)


class CommandOutcome(NamedTuple):
    """What came of a command that was run to its end."""

    code: int
    """Its exit code, 128 + the signal for one that was killed."""
    output: bytes
    """Its standard output."""
    errors: str
    """The end of its standard error, unless that is this process's."""


def run(
    name: str,
    command: Sequence[str],
    seconds: float = math.inf,
    *,
    environment: Mapping[str, str] | None = None,
    given: bytes | None = None,
    stderr: int | None = PIPE,
    guarded: bool = True,
) -> CommandOutcome:
    """Runs a child to its end, whatever it writes; nothing of it is left. The arguments are those of `Child`.

    Raises `TimeoutError` after `seconds`, `ChildError` if it writes more than `MOST_OUTPUT` bytes of output, and `OSError` if it
    cannot be started.
    """
    deadline = time.monotonic() + seconds
    how: dict[str, Any] = {"environment": environment, "given": given, "stderr": stderr, "guarded": guarded}
    with Child(name, command, stdout=PIPE, **how) as child, selectors.DefaultSelector() as open_pipes:
        output, errors = bytearray(), bytearray()
        open_pipes.register(child.stdout, selectors.EVENT_READ, output)
        if child._process.stderr is not None:
            open_pipes.register(child._process.stderr, selectors.EVENT_READ, errors)
        while open_pipes.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in open_pipes.select(None if math.isinf(left) else left):
                data = os.read(key.fd, LONGEST_LINE)
                if not data:
                    open_pipes.unregister(key.fd)
                key.data.extend(data)
            del errors[:-KEPT_ERRORS]
            if len(output) > MOST_OUTPUT:
                raise ChildError(f"{name} wrote more than {MOST_OUTPUT} bytes")
        try:
            code = child.wait(None if math.isinf(seconds) else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(f"{name} did not end within {seconds:g} s") from None
        return CommandOutcome(code, bytes(output), errors.decode(errors="replace"))


def size_of(file: Path) -> int:
    """Returns the size of a child's log in bytes; 0 if it cannot be read, since that must not disturb whoever watches it."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def last_lines(log_file: Path, count: int = 20, start: int = 0, end: int | None = None) -> list[str]:
    """Returns the last lines of a worker's output, between two positions in bytes; empty when it wrote none."""
    try:
        with open_regular(log_file) as file:
            end = min(size_of(log_file), end) if end is not None else size_of(log_file)
            first = max(start, end - 64 * 1024)
            file.seek(first)
            lines = file.read(max(0, end - first)).decode(errors="replace").splitlines()
    except (FileNotFoundError, UntrustedFileError):
        return []
    return [line.rstrip() for line in lines[-count:]]
