"""A program for the tests: runs the workers in a JSON file and prints, line by line, their states and the outcome.
With `adopt` it goes on with what an earlier one left. While there is a file `full`, the disk is full."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from counterpoint.cluster.attended.attended_job import AttendedJob
from counterpoint.cluster.master import state_writer
from counterpoint.cluster.spec import JobSpec, RoleSpec
from counterpoint.transport.files.atomic import Buffer, write_atomically


def show(job: AttendedJob) -> None:
    states = {view.name: asdict(view) for view in job.views()}
    print(json.dumps({"job": job.state, "workers": states}), flush=True)


def fill(full: Path) -> None:
    def write(path: Path, *buffers: Buffer, mode: int) -> None:
        if full.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_atomically(path, *buffers, mode=mode)

    vars(state_writer)["write_atomically"] = write


def main() -> None:
    file = Path(sys.argv[1])
    fill(file.parent / "full")
    defaults = {"ready_timeout_seconds": None, "silence_timeout_seconds": None, "max_restarts": 0}
    roles = [RoleSpec.model_validate(defaults | role) for role in json.loads(file.read_text())]
    spec = JobSpec(name="job", roles=tuple(roles), lease_seconds=float(os.environ.get("CLUSTER_LEASE", "60")))
    job = AttendedJob(
        spec,
        file.parent / "control",
        show,
        on_trouble=lambda trouble: print(json.dumps({"trouble": trouble}), flush=True),
    )
    outcome = asyncio.run(job.run(adopt="adopt" in sys.argv))
    print(json.dumps({"outcome": asdict(outcome)}), flush=True)
    sys.exit(outcome.code)


if __name__ == "__main__":
    main()
