"""The guard of one agent's process: when the agent has ended, or the one who started it has, nothing below it is left.

It runs as a script (`python -I -S agent_guard.py ENDED GO COMMAND...`), or in a fork of `agent_template`, on the standard library
alone. It starts the agent. To the pipe `ENDED` it writes two lines: its own process id and, at the agent's end, the exit code,
negative for a signal's number. Then it waits until the pipe `GO` is closed, so that what the agent wrote can be taken before
anybody hears of its end; kills everything below it, of whatever session; and ends, which closes `ENDED`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from typing import NoReturn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "transport", "process"))
import launch  # type: ignore[import-not-found]

del sys.path[0]

REAP_SECONDS = 5.0
"""How often processes that the agent left are collected once they have ended."""


def guard(ended: int, go: int) -> None:
    """Forks, and returns in the new process, which is to become the agent; the one that called guards it and ends in here."""
    pid = os.getpid()
    try:
        os.write(ended, f"{pid}\n".encode())
        launch.become_subreaper()
        agent = os.fork()
    except OSError as error:
        with suppress(OSError):  # nobody is left to be told
            os.write(2, f"no process for the agent: {error}\n".encode())
            os.write(ended, f"{launch.COMMAND_NOT_STARTED}\n".encode())
        os._exit(launch.COMMAND_NOT_STARTED)
    if agent == 0:
        os.setsid()
        launch.die_with_parent(signal.SIGKILL, pid)
        os.close(ended)
        os.close(go)
        return
    try:
        _attend(agent, ended, go)
    except BaseException as error:  # noqa: BLE001 - a fork of a template never returns to its code
        os.write(2, f"the guard of an agent failed: {error!r}\n".encode())
    finally:
        os._exit(0)


def _attend(agent: int, ended: int, go: int) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (ended, go):
            with suppress(OSError):  # that of the list itself is closed by now
                os.close(descriptor)
    descriptor = os.pidfd_open(agent)
    codes: dict[int, int] = {}
    while agent not in codes:
        ready, _, _ = select.select([descriptor, go], [], [], REAP_SECONDS)
        if go in ready:
            break
        codes |= launch.reap()
    if agent in codes:
        code = codes[agent]
        os.write(ended, f"{128 - code if code > 128 else code}\n".encode())
        os.read(go, 1)
    launch.kill_descendants()


def main(ended: int, go: int, command: list[str]) -> NoReturn:
    """See the module."""
    guard(ended, go)
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and an ignored signal survives exec
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(launch.COMMAND_NOT_STARTED)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
