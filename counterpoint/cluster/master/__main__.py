"""`python -m counterpoint.cluster.master DIRECTORY`: the master of the job in a directory; of one on Ray, it has Ray run it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_files import read_job
from counterpoint.cluster.master.main import LOG_FORMAT, MasterProcess
from counterpoint.cluster.master.standby import HungMaster, Standby
from counterpoint.sweep.store import StoreError

logger = logging.getLogger(__name__)

CANNOT_RUN = 2
"""Exit code when there is no job in the directory, or it cannot be read."""


def main(arguments: Sequence[str]) -> int:
    """Runs the master of a job, or has Ray run it; returns the exit code.

    It is the job's, `LOST`, `HELD` or `CANNOT_RUN`; 0 once Ray runs the master.
    """
    parser = argparse.ArgumentParser(
        "python -m counterpoint.cluster.master", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("directory", type=Path, help="the job's directory, which `submit` made")
    parser.add_argument(
        "--standby", action="store_true", help="wait as long as another master lives, and then take over"
    )
    parser.add_argument("--keep-standby", action="store_true", help="keep a further process that waits to take over")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    directory = given.directory.resolve()
    try:
        job = read_job(directory)
        if job.backend == "ray":
            from counterpoint.cluster.master.on_ray import start_actors  # for no job on this machine alone

            return start_actors(directory, job)
        hung = HungMaster(directory, job.spec.lease_seconds) if given.standby else None
        standby = Standby(directory) if given.keep_standby else None
        return asyncio.run(MasterProcess(directory, job, hung=hung, standby=standby).run())
    except (ClusterError, StoreError, ValueError, ImportError) as error:
        logger.error("%s", error)
        return CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
