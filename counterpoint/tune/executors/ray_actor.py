"""The actor that stands for one trial on Ray: it runs the trial's process as a child, passes messages on, and nothing else.

The process is the same as on one machine (`counterpoint/tune/executors/trial_process.py`), below a guardian
(`transport/process/launch.py`): whatever ends the actor kills it and all that it started. Ray never starts either again; the
experiment decides. The user's code is not in
the actor, and is not pickled: the process imports it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from counterpoint.transport.frames import BadFrame
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.exit_codes import describe_exit
from counterpoint.tune.executors.frames import MESSAGES, receive
from counterpoint.tune.executors.trial_process import command

LONGEST_CRASH = 64 * 2**10


class TrialActor:
    """Runs a trial's process. Its methods run on threads of Ray, several at a time."""

    def __init__(self, path: list[str]) -> None:
        """Starts the process, which searches modules in `path`."""
        self._connection, theirs = socket.socketpair()
        self._theirs = theirs
        self._crash = os.memfd_create("crash")
        self._path = path
        self._heard: list[bytes] = []
        self._how = ""
        """How the process ended."""
        self._changed = threading.Condition()
        self._sent = 0
        self._sending = threading.Condition()
        self._started = threading.Event()
        # The kernel tells the guardian when the thread that started it has ended; so that thread waits for the guardian.
        threading.Thread(target=self._run, name="guardian", daemon=True).start()

    def send(self, number: int, data: bytes) -> None:
        """Sends the message of that number to the process, after those before it; nothing happens if the process is gone."""
        with self._sending:
            self._sending.wait_for(lambda: self._sent == number)
            with contextlib.suppress(OSError):  # `hear` tells of its end
                self._connection.sendall(data)
            self._sent += 1
            self._sending.notify_all()

    def hear(self, after: int) -> tuple[list[bytes], str]:
        """Waits for what the process has said after so many messages, and how it ended, empty before its end."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._heard) > after or self._how)
            return self._heard[after:], self._how

    def end(self) -> None:
        """Has the guardian kill the process and all below it."""
        self._started.wait()
        self._process.kill_soon()

    def _run(self) -> None:
        """Starts the process, passes on what it says, and waits for its end."""
        with self._theirs:
            descriptors = (self._theirs.fileno(), self._crash)
            self._process = Child("the process of a trial", command(*descriptors, self._path), pass_fds=descriptors)
        self._started.set()
        broken = ""
        try:
            while (message := receive(self._connection)) is not None:
                with self._changed:
                    self._heard.append(MESSAGES.frame(message))
                    self._changed.notify_all()
        except BadFrame as error:
            broken = f" after it broke the protocol: {error}"
            self.end()
        code = self._process.wait()
        crash = os.pread(self._crash, LONGEST_CRASH, 0).decode(errors="replace").strip()
        with self._changed:
            self._how = describe_exit(code) + broken + (f"\n\nwhere it was:\n{crash}" if crash else "")
            self._changed.notify_all()
