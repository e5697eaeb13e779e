"""The ledger counts each request once, whatever is repeated and whenever its process ends."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from counterpoint.service.records import ledger
from counterpoint.service.records.database import Database, open_to_read
from counterpoint.service.records.ledger import Ledger, Used, used_by_day


def ledger_in(directory: Path) -> Ledger:
    return Ledger(Database(directory / "records.db"))


def kept(directory: Path) -> dict[str, Used]:
    """What a ledger has on the disk, by account."""
    found: dict[str, Used] = {}
    for accounts in used_by_day(open_to_read(directory / "records.db").execute).values():
        for account, used in accounts.items():
            found.setdefault(account, Used()).add(used)
    return found


async def test_a_repetition_counts_once_also_after_a_kill(tmp_path: Path) -> None:
    first = ledger_in(tmp_path)
    await first.count("a", "s1:train:0:1", Used(trained=10, seconds=0.5))
    await first.count("a", "s1:train:0:1", Used(trained=10, seconds=0.5))
    second = ledger_in(tmp_path)
    await asyncio.gather(*(second.count("a", f"s1:train:0:{number}", Used(trained=10)) for number in (3, 1, 2, 3)))
    await second.count("b", "s2:train:0:1", Used(forward=7))
    assert kept(tmp_path) == {"a": Used(trained=30, seconds=0.5), "b": Used(forward=7)}


async def test_what_was_not_told_counts_not_after_a_kill_and_at_an_end(tmp_path: Path) -> None:
    first = ledger_in(tmp_path)
    first.owe("a", "s1:sample:0:0", Used(prompt=5, sampled=2))
    first.owe("a", "s1:sample:0:1", Used(prompt=5, sampled=3))
    assert first.today("a") == 15
    await first.told("s1:sample:0:0")
    await first.told("s1:sample:0:0")
    assert kept(tmp_path) == {"a": Used(prompt=5, sampled=2)}
    await first.end("s1:")
    assert kept(tmp_path) == {"a": Used(prompt=10, sampled=5)}
    await first.count("a", "chat:0", Used(sampled=1))
    await first.end("chat:")
    assert first.sources() == []


async def test_a_sample_that_is_made_again_counts_again(tmp_path: Path) -> None:
    first = ledger_in(tmp_path)
    for _ in range(3):
        first.owe("a", "s1:sample:0:0", Used(sampled=2))
        await first.told("s1:sample:0:0")
    first.owe("a", "s1:sample:0:1", Used(sampled=2))
    first.owe("a", "s1:sample:0:1", Used(sampled=2))
    assert first.today("a") == 10
    await first.end("s1:")
    assert first.today("a") == 10
    assert kept(tmp_path) == {"a": Used(sampled=10)}


async def test_the_disk_has_a_sum_and_stretches_in_place_of_requests(tmp_path: Path) -> None:
    first = ledger_in(tmp_path)
    first.assign("s1", "p")
    for number in range(300):
        await first.count("a", f"s1:train:0:{number}", Used(trained=1), is_journalled=number % 2 == 0)
    await first.count("a", "s1:train:0:7", Used(trained=1))
    assert kept(tmp_path) == {"a/p": Used(trained=300)}
    assert first.today("a") == 300
    rows = await asyncio.to_thread(Database(tmp_path / "records.db").rows, "SELECT * FROM counted")
    assert [tuple(row) for row in rows] == [("s1:train:0", "[[0,299]]")]


async def test_only_the_newest_days_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT_DAYS", 2)
    first = ledger_in(tmp_path)
    for day in (3, 1, 4, 2):
        monkeypatch.setattr(ledger, "day_now", lambda day=day: f"2026-11-0{day}")
        await first.count("a", f"s1:train:0:{day}", Used(trained=day))
    assert set(first.days()) == set(ledger_in(tmp_path).days()) == {"2026-11-03", "2026-11-04"}


async def test_a_disk_that_takes_nothing_costs_no_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ledger_in(tmp_path)
    with monkeypatch.context() as broken:

        def full(*_: object, **__: object) -> Future[None]:
            failed = Future[None]()
            failed.set_exception(OSError(28, "no space left"))
            return failed

        broken.setattr(Database, "submit", full)
        await first.count("a", "s1:train:0:1", Used(trained=10))
        assert kept(tmp_path) == {}
    await first.count("a", "s1:train:0:2", Used(trained=1))
    assert kept(tmp_path) == {"a": Used(trained=11)}


async def test_many_counts_at_once_are_few_commits_and_one_that_is_cancelled_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, commits, submit = ledger_in(tmp_path), [], Database.submit

    def submitted(self: Database, change: Any, *, durable: bool = True) -> Any:
        commits.append(durable)
        return submit(self, change, durable=durable)

    monkeypatch.setattr(Database, "submit", submitted)
    counts = [
        asyncio.create_task(first.count("a", f"s1:train:0:{number}", Used(trained=1), is_journalled=number != 99))
        for number in range(200)
    ]
    await asyncio.sleep(0)
    counts[0].cancel()
    counts[50].cancel()
    await asyncio.gather(*counts, return_exceptions=True)
    assert kept(tmp_path) == {"a": Used(trained=200)}
    assert commits in ([True], [False, True])


async def test_what_the_journal_has_waits_for_no_disk_until_the_journal_forgets_it(tmp_path: Path) -> None:
    database = Database(tmp_path / "records.db")
    first = Ledger(database)
    await first.count("a", "s1:train:0:1", Used(trained=10), is_journalled=True)
    assert database.has_unflushed
    await asyncio.to_thread(first.flush)
    assert not database.has_unflushed
    await first.count("a", "s1:train:0:2", Used(trained=10), is_journalled=True)
    await first.count("a", "s1:sample:0:0", Used(sampled=1))
    assert not database.has_unflushed, "one flush is of all that came before"


def test_numbers_are_kept_as_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[int]] = []
    assert all(ledger._insert(found, number) for number in (5, 3, 4, 9, 1, 2, 0))
    assert found == [[0, 5], [9, 9]]
    assert not any(ledger._insert(found, number) for number in (0, 4, 5, 9))
    monkeypatch.setattr(ledger, "MOST_STRETCHES", 2)
    assert ledger._insert(found, 20)
    assert found == [[9, 9], [20, 20]]


async def test_a_key_has_not_endless_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_PROJECTS", 2)
    first = ledger_in(tmp_path)
    for number in range(5):
        first.assign(f"s{number}", f"p{number}")
        await first.count("a", f"s{number}:train:0:1", Used(trained=1))
        await first.count("b", f"s{number}:train:0:2", Used(trained=1))
    assert kept(tmp_path)["a"] == Used(trained=2)
    assert len([account for account in kept(tmp_path) if account.startswith("a")]) == 4
    assert first.today("a") == 5
