"""The service's database: one SQLite file with its clients' records, and the use of each.

One thread writes, and commits waiting changes together, so that many requests wait for one flush of the disk. Readers see the
last commit and wait for no writer: the file has a write-ahead log. On a network file system, where SQLite has no such log, it
has a rollback journal. All but `submit` blocks: call it in a thread.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.transport.errors import UserError
from counterpoint.transport.files.mounts import file_system

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Changes of one commit: the loop wakes all of its waiters at once, and each then answers its client."""

BUSY_SECONDS = 30.0
"""Seconds that SQLite waits for another process that reads or writes, such as a backup."""

OF_A_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "9p", "afs", "sshfs", "s3fs",
    "juicefs", "gcsfuse", "ceph-fuse",
}  # fmt: skip
"""Kinds of file systems on which SQLite has no write-ahead log (https://sqlite.org/wal.html), some of them by FUSE."""

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE sessions (
        session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, finished INT NOT NULL, ending TEXT, display_name TEXT,
        created REAL NOT NULL, project TEXT NOT NULL, heard REAL NOT NULL, bytes INT NOT NULL, user_metadata TEXT);
    CREATE INDEX sessions_heard ON sessions (heard);
    CREATE INDEX sessions_owner ON sessions (owner);
    CREATE TABLE models (
        model_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, run_id TEXT NOT NULL, owner TEXT NOT NULL, rank INT NOT NULL,
        target_modules TEXT NOT NULL, start_run TEXT NOT NULL, start_step INT NOT NULL, start_optimizer INT NOT NULL,
        created_by TEXT NOT NULL, created REAL NOT NULL, seed INT, start_adapter TEXT NOT NULL, alpha REAL NOT NULL,
        looks INT NOT NULL DEFAULT 0, next_look REAL NOT NULL DEFAULT 0, bytes INT NOT NULL, user_metadata TEXT);
    CREATE INDEX models_session ON models (session_id);
    CREATE INDEX models_owner ON models (owner);
    CREATE INDEX models_run ON models (run_id);
    CREATE INDEX models_start ON models (start_run, start_step) WHERE start_run != '';
    CREATE INDEX models_next_look ON models (next_look);
    CREATE TABLE saved (
        model_id TEXT NOT NULL, session_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, number INT NOT NULL,
        step INT NOT NULL, directory TEXT NOT NULL, created REAL NOT NULL, expires REAL, size INT, recipients TEXT NOT NULL,
        deleted INT NOT NULL DEFAULT 0, bytes INT NOT NULL, user_metadata TEXT);
    CREATE UNIQUE INDEX saved_name ON saved (model_id, kind, name) WHERE NOT deleted;
    CREATE INDEX saved_item ON saved (model_id, kind, number);
    CREATE INDEX saved_deleted ON saved (model_id) WHERE deleted;
    CREATE INDEX saved_expires ON saved (expires) WHERE expires IS NOT NULL AND NOT deleted;
    CREATE INDEX saved_ends ON saved (session_id) WHERE kind IN ('snapshot', 'inflight') AND NOT deleted;
    CREATE INDEX saved_directory ON saved (directory) WHERE directory != '' AND NOT deleted;
    CREATE TABLE samplers (
        sampler_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, owner TEXT NOT NULL, adapter TEXT NOT NULL,
        directory TEXT NOT NULL, path TEXT NOT NULL, model_id TEXT NOT NULL, step INT NOT NULL, follows TEXT NOT NULL,
        clones INT NOT NULL, bytes INT NOT NULL);
    CREATE INDEX samplers_session ON samplers (session_id);
    CREATE INDEX samplers_directory ON samplers (directory) WHERE directory != '';
    CREATE TABLE losses (
        loss_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, bytes INT NOT NULL, graph BLOB NOT NULL);
    CREATE INDEX losses_session ON losses (session_id);
    CREATE TABLE used (
        day TEXT NOT NULL, account TEXT NOT NULL, trained INT NOT NULL, forward INT NOT NULL, prompt INT NOT NULL,
        sampled INT NOT NULL, seconds REAL NOT NULL, PRIMARY KEY (day, account));
    CREATE TABLE counted (source TEXT PRIMARY KEY, stretches TEXT NOT NULL)
    """,
)
"""Maps the number of a version to the statements that make it from the version before."""

Value = TypeVar("Value")

Change = Callable[[sqlite3.Connection], Value]


class DatabaseError(OSError):
    """The database could not write or read, such as on a full disk. Committed changes stay."""


class Database:
    """The database in one file. One process writes it at a time."""

    def __init__(self, path: Path, first: Change[None] = lambda _: None) -> None:
        """Opens it, or makes it with the rows of `first`. Raises `OSError`, and `UserError` for an unusable one."""
        self.path = path
        self._waiting = deque[tuple[Change[Any], bool, Future[Any]]]()
        self._thread = ThreadPoolExecutor(1, "records")
        self._reading = threading.Lock()
        self.is_new = False
        """Whether this process has made it."""
        self.has_unflushed = False
        """Whether a commit did not wait for the disk, and none since has."""
        path.touch(0o600)
        path.chmod(0o600)  # the files beside it get its mode
        self._writer, self._reader = _connect(path), _connect(path)
        try:
            self._set_up(first)
        except BaseException as error:
            self.close()
            if type(error) is sqlite3.DatabaseError:  # others are of its subclasses
                raise UserError(_damaged(path, error)) from error
            if isinstance(error, sqlite3.Error):
                raise DatabaseError(f"{path} cannot be opened: {error}") from error
            raise

    def _set_up(self, first: Change[None]) -> None:
        writer = self._writer
        [[version]] = writer.execute("PRAGMA user_version").fetchall()
        self.is_new = version == 0
        if self.is_new and writer.execute("SELECT 1 FROM sqlite_master").fetchall():
            raise sqlite3.DatabaseError("it has tables that are not the service's")
        if version > len(MIGRATIONS):
            raise UserError(
                f"{self.path} is of version {version}, and this Counterpoint reads up to {len(MIGRATIONS)}: start the newer one "
                "that wrote it"
            )
        [[said]] = writer.execute("PRAGMA quick_check(1)").fetchall()
        if said != "ok":
            raise sqlite3.DatabaseError(said)
        kind = file_system(self.path).removeprefix("fuse.")
        writer.execute(f"PRAGMA journal_mode = {'DELETE' if kind in OF_A_NETWORK else 'WAL'}")
        if kind in OF_A_NETWORK:
            logger.warning(
                "%s is on a network file system (%s): no other process may open it while the service runs, and each commit is "
                "slower; an output_dir on a local disk has neither", self.path, kind,
            )  # fmt: skip
        writer.execute("PRAGMA synchronous = FULL")
        writer.execute("BEGIN IMMEDIATE")
        for migration in MIGRATIONS[version:]:
            for statement in migration.split(";"):
                writer.execute(statement)
        if self.is_new:
            first(writer)
        writer.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        writer.execute("COMMIT")

    def close(self) -> None:
        """Writes waiting changes, and closes the file, once nobody reads it. Each later use fails with `DatabaseError`."""
        self._thread.shutdown()
        with self._reading:  # SQLite ends the process if a connection is closed while it is used
            self._reader.close()
        self._writer.close()

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """Returns the rows of a query. Raises `DatabaseError`."""
        try:
            with self._reading:
                return self._reader.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def write(self, change: Change[Value], *, durable: bool = True) -> Value:
        """Makes a change, and returns its value once it is committed. Raises `DatabaseError`, and the change's errors."""
        return self.submit(change, durable=durable).result()

    def submit(self, change: Change[Value], *, durable: bool = True) -> Future[Value]:
        """Begins a change, in the order of the calls. It goes on if nobody waits for it. Does not block.

        Without `durable` a crash of the machine may lose it, but not a kill of the process, unless a durable one follows.
        Raises `DatabaseError` once the database is closed.
        """
        future = Future[Value]()
        future.set_running_or_notify_cancel()
        self._waiting.append((change, durable, future))
        try:
            self._thread.submit(self._commit)
        except RuntimeError:
            raise DatabaseError(f"{self.path} is closed: the service ends") from None
        return future

    def _commit(self) -> None:
        """Makes a few waiting changes in one commit. A failed one changes nothing, and stops no other."""
        taken = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        if not taken:  # they were in the commit before
            return
        writer, durable = self._writer, any(each[1] for each in taken)
        outcomes: list[tuple[Any, BaseException | None]] = []
        try:
            writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            writer.execute("BEGIN IMMEDIATE")
            for change, _, _ in taken:
                writer.execute("SAVEPOINT one")
                try:
                    outcomes.append((change(writer), None))
                except Exception as error:  # noqa: BLE001 - it is whoever asked for the change that hears of it
                    outcomes.append((None, error))
                    writer.execute("ROLLBACK TO one")
                writer.execute("RELEASE one")
            writer.execute("COMMIT")
            self.has_unflushed = not durable
        except sqlite3.Error as error:
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            outcomes = [(None, error)] * len(taken)
        for (_, _, future), (value, failed) in zip(taken, outcomes, strict=True):
            if failed is None:
                future.set_result(value)
            else:
                future.set_exception(self._failed(failed) if isinstance(failed, sqlite3.Error) else failed)

    def _failed(self, error: sqlite3.Error) -> DatabaseError:
        is_damaged = type(error) is sqlite3.DatabaseError
        return DatabaseError(_damaged(self.path, error) if is_damaged else f"{self.path}: {error}")


def open_to_read(path: Path) -> sqlite3.Connection:
    """Opens the database of a service that may run, and changes nothing. Raises `sqlite3.Error`."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", BUSY_SECONDS, uri=True)


def _connect(path: Path) -> sqlite3.Connection:
    made = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    made.row_factory = sqlite3.Row
    return made


def _damaged(path: Path, error: sqlite3.Error) -> str:
    said = " ".join(str(error).split())
    return (
        f"{path} is damaged, or no database of the service ({said}): restore it from a copy, or move it away, with "
        f"{path.name}-wal beside it, to begin without sessions, saved weights and ledger"
    )
