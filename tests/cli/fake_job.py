"""A program for the tests: `counterpoint run` with workers that only pretend, and write the metrics real ones would."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import cli.run
from cli.job import JobConfig
from cluster.events import Worker

SERVICE = """
import signal, sys, time
from cluster.notify import notify
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
notify("READY=1\\nSTATUS=serving")
time.sleep(600)
"""

ORCHESTRATOR = """
import json, sys, time
from pathlib import Path
from cluster.notify import notify_ready
from tests.cli.conftest import shipped_line, trained_line
output, behaviour = Path(sys.argv[1]), sys.argv[2]
notify_ready()
for directory in ("run_test", "trainer"):
    (output / directory).mkdir(exist_ok=True)
for step in range(1, 21):
    with open(output / "run_test" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(shipped_line(step, time.time())) + "\\n")
    with open(output / "trainer" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(trained_line(step)) + "\\n")
    time.sleep(0.02)
    if behaviour == "fail" and step == 3:
        print("the disk is full", file=sys.stderr)
        sys.exit(3)
    if behaviour == "hang" and step == 3:
        time.sleep(600)
"""


def pretend(config: JobConfig, files: dict[str, Path]) -> list[Worker]:
    """A service and a task in place of the roles."""
    output = config.output_dir
    return [
        Worker("inference_0", [sys.executable, "-c", SERVICE], output / "inference_0.log", ready_timeout_seconds=20),
        Worker(
            "orchestrator",
            [sys.executable, "-c", ORCHESTRATOR, str(output), behaviour],
            output / "orchestrator.log",
            task=True,
            after=("inference_0",),
            ready_timeout_seconds=20,
        ),
    ]


if __name__ == "__main__":
    behaviour = sys.argv[1]
    # As a terminal starts it, also where the tests were started by nohup, which has it ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    cli.run.workers_of = pretend  # type: ignore[attr-defined]
    from cli.main import main

    sys.exit(main(["run", *sys.argv[2:]]))
