"""Stops a whole job of roles, for `counterpoint stop DIRECTORY`."""

from __future__ import annotations

import time
from pathlib import Path

from cli.cluster.wait import job_in
from cluster.errors import ClusterError, JobFailed
from job.number_format import duration
from transport.errors import UserError
from transport.printable import printable


def stop_job(directory: Path) -> int:
    """Stops the job in order and waits for its end. Returns 0 once it has ended, however that was."""
    handle = job_in(directory)
    if (ended := handle.outcome()) is not None:
        print(f"job {handle.spec.name} has ended: {printable(ended.reason)}")
        return 0
    print(f"job {handle.spec.name} is to end; a further `counterpoint stop` kills it", flush=True)
    began = time.monotonic()
    try:
        handle.stop_and_wait()
    except JobFailed as end:
        print(printable(str(end)))
    except ClusterError as error:
        raise UserError(str(error)) from None
    print(f"job {handle.spec.name} has ended after {duration(time.monotonic() - began)}")
    return 0
