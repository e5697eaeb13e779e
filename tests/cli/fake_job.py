"""A program for the tests: `counterpoint run` with workers that only pretend, and write the metrics real ones would."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import cli.run
from cluster.events import Worker
from job.config import JobConfig
from job.workers import worker_of

SERVICE = """
import signal, sys, time
from cluster.notify import notify
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
notify("READY=1\\nSTATUS=serving")
time.sleep(600)
"""


def pretend(config: JobConfig, files: dict[str, Path]) -> list[Worker]:
    """A service, and a task in place of each run, whose behaviour may be named: `fail,other=finish`."""
    output = config.output_dir
    named = dict(word.split("=") for word in behaviour.split(",") if "=" in word)
    default = behaviour.partition(",")[0]
    service = Worker(
        "inference_0", [sys.executable, "-c", SERVICE], output / "inference_0.log", ready_timeout_seconds=20
    )
    program = [sys.executable, "-m", "tests.cli.fake_orchestrator", str(output)]
    return [
        service,
        *(
            Worker(
                worker_of(config, run),
                [*program, run.run_id, named.get(run.run_id, default)],
                output / f"{worker_of(config, run)}.log",
                task=True,
                after=("inference_0",),
                ready_timeout_seconds=20,
                max_restarts=config.max_restarts,
                restart_arguments=("--resume",),
            )
            for run in config.every_run
        ),
    ]


if __name__ == "__main__":
    behaviour = sys.argv[1]
    # As a terminal starts it, also where the tests were started by nohup, which has it ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    cli.run.workers_of = pretend  # type: ignore[attr-defined]
    from cli.main import main

    sys.exit(main(["run", *sys.argv[2:]]))
