"""The service's database: what was answered outlives a kill, one bad change stops no other, and a damaged file is refused."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from counterpoint.service.records import database as module
from counterpoint.service.records.database import MIGRATIONS, Database, DatabaseError
from counterpoint.transport.errors import UserError

WRITER = """
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from counterpoint.service.records.database import Database
database = Database(Path(sys.argv[1]))
for number in range(10**6):
    database.write(lambda c: c.execute("INSERT INTO counted VALUES (?, '')", (number,)), durable=number % 2 == 0)
    print(number, flush=True)
"""


def insert(database: Database, *names: str) -> None:
    database.write(lambda c: c.executemany("INSERT INTO counted VALUES (?, '')", [(each,) for each in names]))


def names(database: Database) -> list[str]:
    return [row["source"] for row in database.rows("SELECT source FROM counted ORDER BY source")]


@pytest.mark.slow
def test_what_was_answered_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    seen = [int(writer.stdout.readline()) for _ in range(50)]
    writer.send_signal(signal.SIGKILL)
    seen += [int(line) for line in writer.stdout]
    writer.stdout.close()
    writer.wait()
    assert {*map(str, seen)} <= {*names(Database(path))}


def test_its_files_are_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    former = os.umask(0)
    try:
        path.touch(0o666)
        insert(database := Database(path), "a")
    finally:
        os.umask(former)
    assert {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == dict.fromkeys(
        ("records.db", "records.db-wal", "records.db-shm"), 0o600
    )
    database.close()
    assert [each.name for each in tmp_path.iterdir()] == ["records.db"]


def test_a_change_that_fails_changes_nothing_and_stops_no_other(tmp_path: Path) -> None:
    database = Database(tmp_path / "records.db")

    def fails(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO counted VALUES ('half', '')")
        raise KeyError("no")

    submitted: list[Future[Any]] = [
        database.submit(lambda c: c.execute("INSERT INTO counted VALUES ('a', '')").rowcount),
        database.submit(fails),
        database.submit(lambda c: c.execute("INSERT INTO counted VALUES ('a', '')").rowcount),
        database.submit(lambda c: c.execute("INSERT INTO counted VALUES ('b', '')").rowcount),
    ]
    assert [submitted[each].result() for each in (0, 3)] == [1, 1]
    assert isinstance(submitted[1].exception(), KeyError)
    assert isinstance(submitted[2].exception(), DatabaseError)
    assert names(database) == ["a", "b"]


def test_a_full_disk_refuses_and_loses_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / "records.db")
    insert(database, "a")
    [[pages]] = database.rows("PRAGMA page_count")
    database._writer.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DatabaseError, match="full"):
        insert(database, *(f"{number} {'x' * 4000}" for number in range(9)))
    database._writer.execute("PRAGMA max_page_count = 1000000")
    insert(database, "b")
    assert names(database) == ["a", "b"]


@pytest.mark.parametrize("damage", ["text", "page", "tables"])
def test_a_damaged_database_is_refused_in_a_sentence_and_left(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "records.db"
    if damage == "tables":
        sqlite3.connect(path).execute("CREATE TABLE others (name)")
    else:
        database = Database(path)
        insert(database, *(f"{number} {'x' * 500}" for number in range(100)))
        database.close()
        whole = path.read_bytes()
        path.write_bytes(b"no database" * 1000 if damage == "text" else whole[:-20_000] + bytes(20_000))
    damaged = path.read_bytes()
    with pytest.raises(UserError, match=r"records\.db is damaged.*restore it from a copy, or move it away"):
        Database(path)
    assert path.read_bytes() == damaged


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    Database(path).close()
    sqlite3.connect(path).execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(UserError, match="start the newer one"):
        Database(path)


def test_a_migration_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.db"
    insert(database := Database(path), "a")
    database.close()
    monkeypatch.setattr(module, "MIGRATIONS", (*MIGRATIONS, "ALTER TABLE counted ADD COLUMN more INT; SELECT nonsense"))
    with pytest.raises(DatabaseError):
        Database(path)
    monkeypatch.setattr(module, "MIGRATIONS", (*MIGRATIONS, "ALTER TABLE counted ADD COLUMN more INT DEFAULT 7"))
    for _ in range(2):
        database = Database(path)
        assert [tuple(row) for row in database.rows("SELECT * FROM counted")] == [("a", "", 7)]
        database.close()


@pytest.mark.parametrize(("kind", "mode"), [("ext4", "wal"), ("nfs4", "delete"), ("fuse.sshfs", "delete")])
def test_a_network_file_system_has_no_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, mode: str
) -> None:
    monkeypatch.setattr(module, "file_system", lambda _: kind)
    database = Database(tmp_path / "records.db")
    insert(database, "a")
    assert names(database) == ["a"]
    assert [tuple(row) for row in database.rows("PRAGMA journal_mode")] == [(mode,)]
    assert ("is on a network file system" in caplog.text) == (mode == "delete")


def test_who_reads_or_writes_while_it_is_closed_fails_and_nothing_else(tmp_path: Path) -> None:
    """A sweep may still read while the service ends; that once ended the process."""
    counts = "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 5000) SELECT n FROM numbers"

    def reads(database: Database, begun: threading.Event) -> None:
        while True:
            begun.set()
            database.rows(counts)

    for number in range(4):
        database, begun = Database(tmp_path / f"{number}.db"), threading.Event()
        with ThreadPoolExecutor() as threads:
            reading = threads.submit(reads, database, begun)
            begun.wait(60)
            database.close()
            assert isinstance(reading.exception(60), DatabaseError)
        with pytest.raises(DatabaseError, match="closed"):
            database.submit(lambda connection: None)
