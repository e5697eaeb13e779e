"""A program for the tests: `counterpoint run` of a job with `serve = true`, whose run only pretends.

`python -m tests.serve.served_job JOB_FILE`. The run waits at its third step for `control/go`. What dies is started again soon.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import counterpoint.cli.run
import counterpoint.cluster.manager.ending
from counterpoint.cluster.spec import JobSpec, RoleSpec
from counterpoint.job.config import JobConfig
from counterpoint.job.workers import server_of_the_page, worker_of
from tests.support.polling import DEADLINE_SECONDS


def pretend(config: JobConfig, files: dict[str, Path]) -> JobSpec:
    assert config.serve is not None
    run = config.orchestrator
    orchestrator = RoleSpec(
        name=worker_of(config, run),
        command=(sys.executable, "-m", "tests.cli.fake_orchestrator", str(config.output_dir), run.run_id, "wait"),
        log_file=config.output_dir / "orchestrator.log",
        silence_timeout_seconds=None,
        task=True,
        ready_timeout_seconds=DEADLINE_SECONDS,
        max_restarts=0,
    )
    return JobSpec(name="job", roles=(server_of_the_page(config, config.serve), orchestrator), lease_seconds=60.0)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    counterpoint.cluster.manager.ending.FIRST_BACKOFF_SECONDS = 0.05
    counterpoint.cluster.manager.ending.LONGEST_BACKOFF_SECONDS = 0.05
    counterpoint.cli.run.specification = pretend  # type: ignore[attr-defined]
    from counterpoint.cli.main import main

    sys.exit(main(["run", *sys.argv[1:]]))
