"""The jobs that `serve` shows: their directories, by id, and the readers that follow their files.

`Jobs` knows only directories. It never fails because one is missing or damaged: a directory may appear, vanish, or be replaced
while we look. What reads a job's files is a reader, made on first use and kept, so that the next look reads only what is new.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from counterpoint.cluster.job_files import JOB_FILE as CLUSTER_JOB_FILE
from counterpoint.job.directory import JOB_FILE, MAX_JOB_BYTES, control_directory, is_directory, run_ids_in
from counterpoint.job.reading.fine_tuning import DIRECTORY, RUN_ID
from counterpoint.serve.errors import NotFound
from counterpoint.serve.readers.population import is_experiment
from counterpoint.serve.readers.sweep import is_sweep
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

Reader = TypeVar("Reader")
Kind = Literal["job", "cluster", "experiment", "sweep", "other", "missing"]

MOST_JOBS = 500
"""Jobs of one folder that are shown: those in which something was made last."""

MOST_READERS = 2 * MOST_JOBS
"""Readers that are kept, of all jobs; the one that was used longest ago goes first."""


def kind_of(directory: Path) -> Kind:
    """Returns what a directory holds now."""
    try:
        if not directory.is_dir():
            return "sweep" if directory.is_file() and is_sweep(directory) else "missing"
        if (directory / CLUSTER_JOB_FILE).is_file():
            return "cluster"
        if (directory / JOB_FILE).is_file() or run_ids_in(directory):
            return "job"
        if is_experiment(directory):
            return "experiment"
        return "sweep" if is_sweep(directory) else "other"
    except OSError:  # such as one that we may not read
        return "missing"


@dataclass(frozen=True, slots=True)
class Job:
    """One directory that was named on the command line, or that is in such a folder of jobs."""

    id: str
    """The base name of the directory, made unique."""
    directory: Path
    """Absolute, without links. It may not exist, or hold anything."""

    def run_directory(self, run: str) -> Path:
        """Returns `run_<run>/` in it.

        Raises `NotFound` unless there is such a directory and it is no link, which may lead anywhere.
        """
        path = self.directory / f"run_{run}"
        if re.fullmatch(IDENTIFIER_PATTERN, run) is None or not is_directory(path):
            raise NotFound(
                f"job {self.id} has no run {run[:64]!r}", where="run", value=run, advice="see the runs of the job"
            )
        return path


@dataclass(slots=True)
class _Kept:
    """A reader, whose user holds its lock."""

    identity: tuple[int, int] | None
    """Device and inode of the directory that it reads."""
    reader: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Jobs:
    """Every job by its id, in the order of the command line. Safe to use from several threads.

    A directory that holds no job, but folders that do, stands for the jobs in these, and for those that begin there later. The
    fine-tuning with which a job begins is a job of its own, after it.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._jobs: dict[str, Job] = {}
        self._by_directory: dict[Path, Job] = {}
        self.named = [*dict.fromkeys(path.absolute().resolve() for path in directories)]
        """What stands on the command line."""
        self._readers: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        list(self)  # which gives them their ids

    def __iter__(self) -> Iterator[Job]:
        """Yields the jobs in the order of the command line, those of a folder by name."""
        for directory in self.named:
            found = [each for path in _jobs_in(directory) or [directory] for each in (path, *_fine_tuning_in(path))]
            with self._lock:
                jobs = [self._add(path) for path in found]
            yield from jobs

    def get(self, job_id: str) -> Job:
        """Returns the job of that id. Raises `NotFound`."""
        job = self._jobs.get(job_id) or next((job for job in self if job.id == job_id), None)
        if job is None:
            known = ", ".join([*self._jobs][:20])
            raise NotFound(f"there is no job {job_id[:64]!r}", where="job", value=job_id, expected=f"one of {known}")
        return job

    @contextmanager
    def reading(self, job: Job, kind: Callable[..., Reader], *arguments: Hashable) -> Iterator[Reader]:
        """Yields the one `kind(job.directory, *arguments)`, which nobody else uses during the block.

        It is made at the first use and kept until the directory is replaced by another of its name, or until many others have
        been used since. So a reader may remember how far it has read. It must bound what it keeps. An exception leaves it
        in place: it must stay usable.
        """
        key = (job.id, kind, arguments)
        identity = _identity_of(job.directory)
        with self._lock:
            kept = self._readers.get(key)
            if kept is None or kept.identity != identity:
                kept = self._readers[key] = _Kept(identity)
            self._readers.move_to_end(key)
            while len(self._readers) > MOST_READERS:
                self._readers.popitem(last=False)
        with kept.lock:
            if kept.reader is None:
                kept.reader = kind(job.directory, *arguments)
            yield kept.reader

    def _add(self, directory: Path) -> Job:
        """Returns the job in a directory. Its id, which no other job has, is made of the directory's name."""
        if (known := self._by_directory.get(directory)) is not None:
            return known
        is_of_a_job = directory.name == DIRECTORY and directory.parent in self._by_directory
        given = f"{directory.parent.name[:40]}-{directory.name}" if is_of_a_job else directory.name
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", given)[:48].lstrip("_.-") or "job"
        number = 2
        unique = name
        while unique in self._jobs:
            unique, number = f"{name}-{number}", number + 1
        job = self._jobs[unique] = self._by_directory[directory] = Job(unique, directory)
        return job


def _jobs_in(directory: Path) -> list[Path]:
    """Returns the jobs in a directory that is none itself, by name."""
    try:
        if kind_of(directory) != "other" or kind_of(control_directory(directory)) == "cluster":
            return []
        with os.scandir(directory) as entries:
            found = [each for each in entries if each.is_dir(follow_symlinks=False)]
        found.sort(key=_changed, reverse=True)
        jobs = (path for each in found if kind_of(path := Path(each.path)) in ("job", "cluster", "experiment"))
        return sorted(islice((path for path in jobs if not _was_moved_aside(path)), MOST_JOBS))
    except OSError:
        return []


def _fine_tuning_in(directory: Path) -> list[Path]:
    """Returns the directory of the fine-tuning that begins a job of one run (`counterpoint/job/fine_tuning.py`), if one does."""
    own = directory / DIRECTORY
    return [own] if (directory / JOB_FILE).is_file() and (own / f"run_{RUN_ID}").is_dir() else []


def _was_moved_aside(directory: Path) -> bool:
    """Whether `--fresh` moved it there: `NAME.1` beside `NAME`, and its `job.json`, if it has one, is of `NAME`."""
    name, _, number = directory.name.rpartition(".")
    if not (name and number.isdecimal() and directory.with_name(name).is_dir()):
        return False
    try:
        return Path(str(read_json(directory / JOB_FILE, MAX_JOB_BYTES).get("output_dir"))).name == name
    except FileNotFoundError:
        return True
    except (OSError, UntrustedFileError):
        return False


def _changed(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:  # it has gone
        return 0.0


def _identity_of(directory: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino
