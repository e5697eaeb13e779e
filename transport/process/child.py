"""A child of this process: what it inherits, how its output goes to a file, what it answers, and how it is ended.

Most children run below a guardian (`transport/process/launch.py`:`guarded`), whose exit code is theirs; a guardian passes SIGTERM
on, and upon SIGHUP it kills all that is below it. A guardian that was killed itself would leave what its command had started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from counterpoint.transport.process.launch import SYSTEMD_VARIABLES

AGAIN_SECONDS = 0.1
"""Seconds after which a guardian is told to kill once more: where SIGHUP is ignored, as below `nohup`, one that was
just started may not have heard it."""

LONGEST_LINE = 1 << 20
"""Bytes of a line that a child writes for its parent."""

LOOK_SECONDS = 0.2
"""How often who waits for a child's line looks whether the wait is given up."""

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


class NoLineError(Exception):
    """A child did not write the line that was due. The message says why; its subject is the child."""


def line_of(process: subprocess.Popen[bytes], seconds: float, is_given_up: Callable[[], bool] = lambda: False) -> bytes:
    """Waits for the line by which a child, whose output is a pipe, reports that it is ready, or answers; returns it with its end.

    Lines that were written together are returned together. Raises `NoLineError` after `seconds`, also if a part has come; soon
    after `is_given_up` returns true; if the child ends before; and if the line is longer than `LONGEST_LINE`. It does not end
    the child.
    """
    assert process.stdout is not None
    received, deadline = bytearray(), time.monotonic() + seconds
    poll = select.poll()  # `select.select` refuses descriptors above 1,023
    poll.register(process.stdout, select.POLLIN)
    while b"\n" not in received:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NoLineError(f"wrote no line within {seconds:g} s")
        if is_given_up():
            raise NoLineError("is being stopped")
        if not poll.poll(1000 * min(left, LOOK_SECONDS)):
            continue
        data = os.read(process.stdout.fileno(), LONGEST_LINE)
        if not data:
            with suppress(subprocess.TimeoutExpired):
                raise NoLineError(f"ended with exit code {process.wait(max(0.0, deadline - time.monotonic()))}")
            raise NoLineError("closed its output")
        received += data
        if len(received) > LONGEST_LINE:
            raise NoLineError(f"wrote more than {LONGEST_LINE} bytes")
    return bytes(received)


def kill_guarded(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kills a guarded child with everything below it, and waits for its end."""
    while process.poll() is None:
        for number in (signal.SIGHUP, signal.SIGCONT):  # a guardian may have been stopped with its command
            process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(AGAIN_SECONDS)


def end_guarded(process: subprocess.Popen[bytes] | subprocess.Popen[str], seconds: float) -> bool:
    """Asks a guarded child to end, and kills it and all below it after `seconds`; returns whether it ended by itself."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    kill_guarded(process)
    return False


def size_of(file: Path) -> int:
    """Returns the size of a child's log in bytes; 0 if it cannot be read, since that must not disturb whoever watches it."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
