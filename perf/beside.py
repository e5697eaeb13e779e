"""Runs a command beside a job: starts the job from its file, waits until it is ready, and stops it once the command has ended.

    python -m perf.beside run configs/demo-fleet.toml -- counterpoint sweep configs/demo-sweep.toml --workers 2

The words before `--` are a command of `counterpoint` with a job's file first. The job prints into `DIRECTORY.log`, beside its
directory. The exit code is that of the command after `--`, or 1 if the job ends before.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

from counterpoint.transport.process.child import Child
from perf.commands import STOP_SECONDS, Command, PerfError, is_ready, say, until

MOST_SECONDS = 4 * 3600.0
"""The time of the command, whose reader may end it at any time."""


def main(words: list[str]) -> int:
    """Runs both; returns the exit code."""
    if "--" not in words[2:]:
        print(__doc__, file=sys.stderr)
        return 2
    job, command = words[: words.index("--")], words[words.index("--") + 1 :]
    output = Path(tomllib.loads(Path(job[1]).read_text())["output_dir"])
    output.parent.mkdir(parents=True, exist_ok=True)
    # The commands of this environment come first, as if it were activated.
    variables = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    try:
        with Command(output.with_name(f"{output.name}.log"), *job) as running:
            say(f"{running} {job[1]} starts: {running.log}")
            until("the job", lambda: is_ready(output), [running])
            say(" ".join(command))
            with Child(command[0], command, environment=variables) as beside:
                try:
                    until(f"the end of {command[0]}", lambda: beside.code is not None, [running], seconds=MOST_SECONDS)
                finally:
                    beside.stop(STOP_SECONDS)
                return beside.wait()
    except PerfError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
