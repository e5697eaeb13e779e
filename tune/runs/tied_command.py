"""Executes a command that is killed with the process that started it.

`python -m counterpoint.tune.runs.tied_command PARENT COMMAND...` starts it.
A guardian (`transport/process/launch.py`) would also kill what is below the command. Here the command is `counterpoint run`,
and its roles are to outlive it for the lease of their agent, so that `counterpoint run --resume` takes them over.
"""

from __future__ import annotations

import os
import signal
import sys

from counterpoint.transport.process.launch import die_with_parent

if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
