"""A program for the tests: `counterpoint run` with workers that only pretend, and write the metrics real ones would.

Its curves are drawn if the workers' behaviour has the word `picture`: `finish,picture`. With `listen` the server
listens at its port.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import counterpoint.cli.run
import counterpoint.cluster.manager.ending
import counterpoint.job.server_ports
from counterpoint.cluster.spec import JobSpec, RoleSpec
from counterpoint.job.config import JobConfig
from counterpoint.job.placement import placements
from counterpoint.job.workers import worker_of
from tests.support.polling import DEADLINE_SECONDS

SERVICE = """
import signal, socket, sys, time
from counterpoint.transport.process.notify import notify
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
listening = [socket.create_server(("127.0.0.1", int(port))) for port in sys.argv[1:]]
notify("READY=1\\nSTATUS=serving")
time.sleep(600)
"""


def pretend(config: JobConfig, files: dict[str, Path]) -> JobSpec:
    """A service, and a task in place of each run, whose behaviour may be named: `fail,other=finish`."""
    output, placed = config.output_dir, placements(config)
    named = dict(word.split("=") for word in behaviour.split(",") if "=" in word)
    default = behaviour.partition(",")[0]
    service = RoleSpec(
        name="inference_0",
        command=(sys.executable, "-c", SERVICE, *([str(config.inference.port)] if "listen" in behaviour else [])),
        log_file=output / "inference_0.log",
        ready_timeout_seconds=DEADLINE_SECONDS,
        silence_timeout_seconds=None,
        resources=placed["inference_0"].resources,
        collocate=placed["inference_0"].collocate,
    )
    program = (sys.executable, "-m", "tests.cli.fake_orchestrator", str(output))
    roles = [
        service,
        *(
            RoleSpec(
                name=worker_of(config, run),
                command=(*program, run.run_id, named.get(run.run_id, default)),
                log_file=output / f"{worker_of(config, run)}.log",
                silence_timeout_seconds=None,
                task=True,
                after=("inference_0",),
                ready_timeout_seconds=DEADLINE_SECONDS,
                max_restarts=config.max_restarts,
                restart_arguments=("--resume",),
                collocate=placed["orchestrator"].collocate,
            )
            for run in config.every_run
        ),
    ]
    # Long, since the next command may take a while to start.
    lease = float(os.environ.get("CLUSTER_LEASE", "60"))
    return JobSpec(name="job", roles=tuple(roles), stay=config.stay, lease_seconds=lease)


if __name__ == "__main__":
    behaviour = sys.argv[1]
    # As a terminal starts it, also where the tests were started by nohup, which has it ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "return" in behaviour:
        counterpoint.cluster.manager.ending.FIRST_BACKOFF_SECONDS = 5.0  # a test looks at what waits for its return
    if "picture" not in behaviour:  # its library takes most of a second of CPU, at each job's end
        counterpoint.cli.run._draw_curves = lambda *_: None
        counterpoint.cli.run._prepare_curves = lambda: None
    counterpoint.job.server_ports.FIRST_PORT = int(os.environ.get("PORTS_FROM", "8000"))  # type: ignore[attr-defined]
    counterpoint.cli.run.specification = pretend  # type: ignore[attr-defined]
    from counterpoint.cli.main import main

    sys.exit(main(["run", *sys.argv[2:]]))
