"""A job of roles as its master's state file has it: its workers, and what has changed of late.

Reads jobs of `submit`, and any job's `control/`. The file is read without a lock, so its master never waits for us; it is as the
master wrote it last.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_files import STATE_FILE, JobFile, OutcomeFile, holds_job, read_job, read_outcome
from counterpoint.cluster.state_file import MasterState, read_state
from counterpoint.job.directory import control_directory, is_directory


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A job of roles at one moment."""

    job: JobFile | None = None
    saved: MasterState | None = None
    """None before its master has written it."""
    written: float | None = None
    """The time when that was written."""
    outcome: OutcomeFile | None = None
    problem: str = ""


def cluster_directory(directory: Path) -> Path | None:
    """Returns where a directory has the files of a job of roles: itself, or its `control/`; None if it has none."""
    for place in (directory, control_directory(directory)):
        if is_directory(place) and holds_job(place):
            return place
    return None


class ClusterReader:
    """Follows one job of roles. Not for several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: tuple[MasterState, float] | None = None

    def read(self) -> ClusterState:
        """Reads the state. Damage is told in `problem`; what was read before it stays."""
        place = cluster_directory(self._directory)
        if place is None:
            return ClusterState(problem="the job has no state (yet)")
        try:
            job = read_job(place)
        except ClusterError:
            return ClusterState(problem="the job's file cannot be read")
        if job.journal is not None:
            return ClusterState(job, problem="the job's state is in a storage of its own; ask `counterpoint status`")
        problem = ""
        try:
            written = (place / STATE_FILE).lstat().st_mtime
            saved = read_state(place)
            if saved.job.roles.keys() != {role.name for role in job.spec.roles}:
                raise ClusterError("it is that of another job")
            self._known = saved, written
        except FileNotFoundError:
            self._known = None
        except (ClusterError, OSError) as error:
            problem = f"the job's state cannot be read: {type(error).__name__}"
        known, written_at = self._known or (None, None)
        return ClusterState(job, known, written_at, _outcome_in(place), problem)


def _outcome_in(place: Path) -> OutcomeFile | None:
    try:
        return read_outcome(place)
    except ClusterError:
        return None
