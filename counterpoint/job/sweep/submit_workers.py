"""Submits a sweep's workers as a job of roles, or finds the job that an earlier command submitted.

The job has one role, whose workers are `counterpoint sweep FILE --worker`. They share the targets by their leases, as any workers
do; the job starts those again that die. A directory holds one job, once, so each job of a sweep has a numbered one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from counterpoint.cluster.builder import JobBuilder
from counterpoint.cluster.client import submit_or_find
from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_handle import JobHandle
from counterpoint.cluster.master.backend_choice import backend_class
from counterpoint.cluster.spec import JobSpec
from counterpoint.job.check import SAFE_PATH
from counterpoint.job.sweep.target_process import drain_seconds
from counterpoint.job.sweep.targets import SweepConfig, Target
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically

logger = logging.getLogger(__name__)

SWEEP = (sys.executable, "-m", "counterpoint.cli.main", "sweep")

OUTPUTS = Path("outputs")

SILENCE_SECONDS = 15.0
"""Shortest silence after which a worker is killed and started again; a lease if that is longer."""

GIVE_BACK_SECONDS = 30.0
"""Added to the time limit of a target's process, for its worker to kill it and give the target back."""


def check_workers(config: SweepConfig, targets: Sequence[Target], file: str) -> None:
    """Raises `UserError` for an unknown backend, and for targets whose servers cannot run at once on this machine."""
    try:
        backend_class(config.backend)
    except ClusterError as error:
        raise UserError(f"{file}: {error}") from None
    if config.workers in (None, 1) or config.backend != "local":
        return
    taken: dict[int, Target] = {}
    for target in targets:
        for port in target.ports:
            other = taken.setdefault(port, target)
            if other is not target:
                raise UserError(
                    f"{file}: workers = {config.workers}: targets {other.target_id} and {target.target_id} both start a server "
                    f"at port {port} of this machine; leave inference.port out, or set it for each, as with [[zip]], or let them "
                    "`join` one job"
                )


@dataclass(frozen=True, slots=True)
class GivenSweep:
    """A sweep as its user gave it. The order of its keys counts, since ids follow from it, and is lost in a file as resolved."""

    config: SweepConfig
    targets: Sequence[Target]
    file: Path
    flags: Sequence[str]
    """The flags that override the file: `--key=value`."""
    variables: Mapping[str, str]
    """The environment variables that do."""


def submit_workers(sweep: GivenSweep) -> JobHandle:
    """Returns the job that works on the sweep: the one that an earlier command submitted, if it has not ended, or a new one.

    Raises `UserError` if an earlier one works on another configuration of the sweep, `ClusterError` as `submit`.
    """
    config = sweep.config
    directory = OUTPUTS.absolute() / f"{config.name}-workers"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, is_new = submit_or_find(specification_of(sweep, directory), directory, config.backend)
    if not is_new:
        logger.info("the workers of sweep %s run already; this command waits for them", config.name)
    return handle


def specification_of(sweep: GivenSweep, directory: Path) -> JobSpec:
    """The job. Copies the sweep's file for the workers, so that one that is started again reads the same."""
    given = sweep.file.read_bytes()
    copy = directory / f"sweep-{hashlib.sha256(given).hexdigest()[:12]}.toml"
    write_atomically(copy, given)
    # The paths in a sweep may be relative, and its workers start elsewhere on other nodes.
    in_this_directory = ["/usr/bin/env", f"--chdir={os.getcwd()}"]
    return (
        JobBuilder(f"{sweep.config.name}-workers")
        .role(
            "worker",
            command=[*in_this_directory, *SWEEP, str(copy), *sweep.flags, "--worker"],
            count=sweep.config.workers,
            task=True,
            environment=SAFE_PATH | dict(sweep.variables),
            resources=sweep.config.resources,
            silence_timeout_seconds=max(SILENCE_SECONDS, sweep.config.lease_seconds),
            stop_timeout_seconds=max(map(drain_seconds, sweep.targets)) + GIVE_BACK_SECONDS,
        )
        .build()
    )
