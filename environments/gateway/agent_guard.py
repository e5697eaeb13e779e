"""The guard of one agent's process: when the agent has ended, or the one who started it has, nothing below it is left.

It runs as a script (`python -I -S agent_guard.py ENDED GO COMMAND...`) on the standard library alone. It starts the command, and
writes its exit code to the pipe `ENDED`: negative for a signal's number. Then it waits until the pipe `GO` is closed, so that
what the agent wrote can be taken before anybody hears of its end; kills everything below it, of whatever session; and ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "transport" / "process"))
import launch  # type: ignore[import-not-found]

del sys.path[0]

_REAP_SECONDS = 5.0
"""How often processes that the agent left are collected once they have ended."""


def main(ended: int, go: int, command: list[str]) -> None:
    """See the module."""
    for descriptor in (ended, go):
        os.set_inheritable(descriptor, False)
    launch.become_subreaper()
    guard = os.getpid()
    agent = os.fork()
    if agent == 0:
        _execute(command, guard)
    descriptor = os.pidfd_open(agent)
    codes: dict[int, int] = {}
    while agent not in codes:
        ready, _, _ = select.select([descriptor, go], [], [], _REAP_SECONDS)
        if go in ready:
            break
        codes |= launch.reap()
    if agent in codes:
        code = codes[agent]
        os.write(ended, str(128 - code if code > 128 else code).encode())
        os.close(ended)
        os.read(go, 1)
    launch.kill_descendants()


def _execute(command: list[str], guard: int) -> None:
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and an ignored signal survives exec
            signal.signal(number, signal.SIG_DFL)
        launch.die_with_parent(signal.SIGKILL, guard)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(launch.COMMAND_NOT_STARTED)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
