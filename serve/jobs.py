"""The jobs that `serve` shows: their directories, by id, and the readers that follow their files.

`Jobs` knows only directories. It never fails because one is missing or damaged: a directory may appear, vanish, or be replaced
while we look. What reads a job's files is a reader, made on first use and kept, so that the next look reads only what is new.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.serve.errors import NotFound
from counterpoint.transport.config import IDENTIFIER_PATTERN

Reader = TypeVar("Reader")

MOST_READERS = 512
"""Readers that are kept, of all jobs; the one that was used longest ago goes first."""


@dataclass(frozen=True, slots=True)
class Job:
    """One directory that was named on the command line."""

    id: str
    """The base name of the directory, made unique."""
    directory: Path
    """Absolute, without links. It may not exist, or hold anything."""

    def run_directory(self, run: str) -> Path:
        """Returns `run_<run>/` in it.

        Raises `NotFound` unless there is such a directory and it is no link, which may lead anywhere.
        """
        path = self.directory / f"run_{run}"
        try:
            is_directory = re.fullmatch(IDENTIFIER_PATTERN, run) is not None and stat.S_ISDIR(path.lstat().st_mode)
        except (OSError, ValueError):
            is_directory = False
        if not is_directory:
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
    """Every job by its id, in the order of the command line. Safe to use from several threads."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._jobs: dict[str, Job] = {}
        for directory in dict.fromkeys(path.absolute().resolve() for path in directories):
            job_id = self._free_id(directory)
            self._jobs[job_id] = Job(job_id, directory)
        self._readers: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Job]:
        """Yields the jobs in the order of the command line."""
        return iter(self._jobs.values())

    def get(self, job_id: str) -> Job:
        """Returns the job of that id. Raises `NotFound`."""
        job = self._jobs.get(job_id)
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

    def _free_id(self, directory: Path) -> str:
        """Returns an id that no other job has, made of the directory's name."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", directory.name)[:48].lstrip("_.-") or "job"
        number = 2
        unique = name
        while unique in self._jobs:
            unique, number = f"{name}-{number}", number + 1
        return unique


def _identity_of(directory: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino
