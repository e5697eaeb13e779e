"""The experiment on disk: a journal of every accepted event, and the snapshots that bound it. Held by one runner at a time.

`experiment_snapshot_N` is the state after the events of all journals before `experiment_journal_N`; N grows by one with each
snapshot. A record of the journal is MessagePack in an entry (`transport/files/checked_entries.py`). A runner that is killed
leaves at most half a record at the end, which the next one removes: its instructions were never carried out. Damage is refused.
Records are written at once and flushed to the disk now and then, so the death of a process loses none, and that of the machine
the last seconds.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.checked_entries import DamagedEntry, EntryFile, head_of, read_entries, read_entry_file
from counterpoint.transport.files.lock import holder_of, take_lock
from counterpoint.tune.errors import TuneError

LOCK_NAME = "experiment.lock"
LOCK_SECONDS = 10.0
"""How long the lock is waited for: children of a killed runner may hold it a moment longer."""

_NAME = re.compile(r"experiment_(snapshot|journal)_(\d{6,})\.msgpack")


def snapshot_path(directory: Path, number: int) -> Path:
    """The path of a snapshot."""
    return directory / f"experiment_snapshot_{number:06d}.msgpack"


def journal_path(directory: Path, number: int) -> Path:
    """The path of the journal that follows the snapshot of that number; 0 follows none."""
    return directory / f"experiment_journal_{number:06d}.msgpack"


def holds_experiment(directory: Path) -> bool:
    """Whether a directory holds an experiment that can be resumed."""
    return any(directory.glob("experiment_journal_*.msgpack")) or any(directory.glob("experiment_snapshot_*.msgpack"))


class ExperimentJournal:
    """The journal of a directory, locked."""

    def __init__(self, directory: Path) -> None:
        """Takes the lock. Raises `TuneError` if another process keeps it, `OSError` if the directory cannot be used."""
        self.directory = directory
        self.bytes_since_snapshot = 0
        self.snapshot_bytes = 0
        self._number = 0
        self._file: EntryFile | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _take(directory / LOCK_NAME)

    def read(self) -> tuple[bytes | None, list[bytes]]:
        """Returns the newest snapshot, if there is one, and the records after it; then `append` follows them.

        Raises `TuneError` for damage that a killed process does not leave.
        """
        snapshots = self._numbers("snapshot")
        self._number = snapshots[-1] if snapshots else 0
        snapshot = self._checked_snapshot() if snapshots else None
        self.snapshot_bytes = len(snapshot or b"")
        records, end = read_records(journal_path(self.directory, self._number))
        self.bytes_since_snapshot = end
        self._file = EntryFile(journal_path(self.directory, self._number), end)
        return snapshot, records

    def append(self, records: Sequence[bytes]) -> None:
        """Adds records. Raises `OSError` (disk full): the journal is then as before."""
        assert self._file is not None, "the journal is read or begun first"
        self._file.append([part for record in records for part in (head_of([record]), record)])
        self.bytes_since_snapshot = self._file.length

    def write_snapshot(self, state: bytes) -> None:
        """Makes a state durable, and discards what came before it. Raises `OSError`, after which nothing is missing."""
        number = self._number + 1
        write_atomically(snapshot_path(self.directory, number), head_of([state]), state)
        self._close_journal()
        self._number = number
        self._file = EntryFile(journal_path(self.directory, number), 0)
        self.snapshot_bytes, self.bytes_since_snapshot = len(state), 0
        for kind in ("journal", "snapshot"):
            for old in self._numbers(kind):
                if old < number:
                    path = snapshot_path if kind == "snapshot" else journal_path
                    path(self.directory, old).unlink(missing_ok=True)

    def flush(self) -> None:
        """Waits until all that was appended is on the disk. May be called in a thread, beside `append`."""
        file = self._file
        if file is not None:
            with suppress(OSError):  # a snapshot may have replaced and closed it since; that is on the disk
                file.flush()

    def close(self) -> None:
        """Flushes, and releases the lock."""
        self.flush()
        self._close_journal()
        os.close(self._lock)

    def _close_journal(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _numbers(self, kind: str) -> list[int]:
        found = (_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match[2]) for match in found if match is not None and match[1] == kind)

    def _checked_snapshot(self) -> bytes:
        path = snapshot_path(self.directory, self._number)
        data = path.read_bytes()
        with suppress(DamagedEntry):
            entries = list(read_entries(data))
            if len(entries) == 1 and entries[0][1] == len(data):
                return bytes(entries[0][0])
        raise TuneError(
            f"{path} is damaged: its checksum does not hold. Restore it from a copy, or begin anew elsewhere"
        )


def read_records(path: Path) -> tuple[list[bytes], int]:
    """Returns the whole records of a journal and the offset of their end. Raises `TuneError` for damage."""
    try:
        entries = list(read_entry_file(path)) if path.exists() else []
    except DamagedEntry as error:
        raise TuneError(str(error)) from None
    return [bytes(record) for record, _ in entries], entries[-1][1] if entries else 0


def _take(path: Path) -> int:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return take_lock(path, "another runner holds it")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if time.monotonic() >= deadline:
                holder = holder_of(path)
                who = (
                    f"process {holder.pid} on {holder.host}" if holder is not None and holder.pid else "another process"
                )
                raise TuneError(
                    f"{path.parent}: {who} runs this experiment; stop it first, or choose another name or local_dir"
                ) from None
        time.sleep(0.05)
