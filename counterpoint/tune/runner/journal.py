"""The experiment on disk: a journal of every accepted event, after the state in which it was compacted last.

A record is MessagePack in an entry of `transport/files/journal.py`: a map is a state, a list an event. A runner that is killed
leaves at most half a record at the end, which the next one removes: its instructions were never carried out. Damage is refused.
Records are written at once and flushed to the disk now and then, so the death of a process loses none, and that of the machine
the last seconds. An experiment of before has its newest state and the events after it in two files; they become one.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from counterpoint.transport.files.journal import Body, DamagedJournal, FileJournal, read_entries
from counterpoint.transport.files.lock import holder_of, take_lock
from counterpoint.tune.errors import TuneError

LOCK_NAME = "experiment.lock"
LOCK_SECONDS = 10.0
"""How long the lock is waited for: children of a killed runner may hold it a moment longer."""

JOURNAL = "experiment.journal"

SMALLEST = 4 * 2**20
"""Bytes of a journal that is worth compacting."""

STATE_NAME = re.compile(r"experiment\.journal|experiment_(snapshot|journal)_(\d{6,})\.msgpack")
"""The names of the files that hold an experiment: the one, and those of before."""


def holds_experiment(directory: Path) -> bool:
    """Whether a directory holds an experiment that can be resumed."""
    return directory.is_dir() and any(STATE_NAME.fullmatch(path.name) for path in directory.iterdir())


def open_journal(directory: Path) -> tuple[FileJournal, list[memoryview]]:
    """Returns the journal of a directory whose lock is held, and its records.

    Raises `TuneError` for damage that a killed process does not leave, and `OSError`.
    """
    path = directory / JOURNAL
    journal = FileJournal(path, SMALLEST, () if path.exists() else _records_of_before(directory))
    try:
        records = journal.replay()
    except DamagedJournal as error:
        journal.close()
        raise TuneError(str(error)) from None
    for former in directory.glob("experiment_*_*.msgpack"):
        former.unlink()
    return journal, records


def _records_of_before(directory: Path) -> list[Body]:
    """Returns the newest snapshot, and what the journal after it has. Raises `TuneError` for damage."""
    snapshots = sorted(directory.glob("experiment_snapshot_*.msgpack"))[-1:]
    number = snapshots[0].stem.rpartition("_")[2] if snapshots else "000000"
    records: list[Body] = []
    for path in (*snapshots, directory / f"experiment_journal_{number}.msgpack"):
        content = path.read_bytes() if path.exists() else b""
        bodies, end, is_damaged = read_entries(content)
        if is_damaged or (path in snapshots and (len(bodies) != 1 or end < len(content))):
            raise TuneError(f"{path} is damaged at byte {end}: restore it from a copy, or begin anew elsewhere")
        records += [[body] for body in bodies]
    return records


def take_experiment(directory: Path) -> int:
    """Takes the lock of a directory, which is made if need be; returns its descriptor.

    Raises `TuneError` if another process keeps it, `OSError` if the directory cannot be used.
    """
    path = directory / LOCK_NAME
    try:
        return take_lock(path, "another runner holds it", LOCK_SECONDS)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        holder = holder_of(path)
        who = f"process {holder.pid} on {holder.host}" if holder is not None and holder.pid else "another process"
        raise TuneError(
            f"{directory}: {who} runs this experiment; stop it first, or choose another name or local_dir"
        ) from None
