"""What the first process of a container owes the others: it passes signals on, and reaps the orphans that it inherits.

A command that is PID 1 would be the parent of every orphan, such as what a health check leaves, and would never reap it. So PID 1
stays behind as a small parent, and a child of it becomes the command. `transport/process/launch.py` has the guardian of a worker.
"""

from __future__ import annotations

import os
import signal

from counterpoint.transport.process.launch import reap

NOT_PASSED_ON = frozenset({signal.SIGCHLD, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT})
"""About a child, and of a terminal's job control, which the kernel sends to the whole process group."""


def stay_behind_as_first() -> None:
    """Forks: returns in the child, and never in this process, which ends with the child's exit code, 128 + signal if killed.

    Call it before any thread is started. The kernel kills whatever is left in the container when PID 1 ends.
    """
    watched = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # It was inherited: the kernel would reap the child, and its exit code would be lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = os.fork()
    if command == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        number = signal.sigwait(watched)
        codes = dict(reap())  # before the signal is passed on, so that it never goes to a recycled pid
        if command in codes:
            os._exit(codes[command])
        if number not in NOT_PASSED_ON:
            os.kill(command, number)
