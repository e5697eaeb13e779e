"""The ledger counts each request once, whatever is repeated and whenever its process ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from counterpoint.service import ledger
from counterpoint.service.ledger import Ledger, Used
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.journal import Journal


def kept(directory: Path) -> dict[str, Used]:
    """What a ledger has on the disk, by account."""
    found: dict[str, Used] = {}
    for accounts in Ledger(directory).days().values():
        for account, used in accounts.items():
            found.setdefault(account, Used()).add(used)
    return found


async def test_a_repetition_counts_once_also_after_a_kill(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    await first.count("a", "s1:train:0:1", Used(trained=10, seconds=0.5))
    await first.count("a", "s1:train:0:1", Used(trained=10, seconds=0.5))
    second = Ledger(tmp_path)
    await asyncio.gather(*(second.count("a", f"s1:train:0:{number}", Used(trained=10)) for number in (3, 1, 2, 3)))
    await second.count("b", "s2:train:0:1", Used(forward=7))
    assert kept(tmp_path) == {"a": Used(trained=30, seconds=0.5), "b": Used(forward=7)}


async def test_what_was_not_told_counts_not_after_a_kill_and_at_an_end(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
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
    first = Ledger(tmp_path)
    for _ in range(3):
        first.owe("a", "s1:sample:0:0", Used(sampled=2))
        await first.told("s1:sample:0:0")
    first.owe("a", "s1:sample:0:1", Used(sampled=2))
    first.owe("a", "s1:sample:0:1", Used(sampled=2))
    assert first.today("a") == 10
    await first.end("s1:")
    assert first.today("a") == 10
    assert kept(tmp_path) == {"a": Used(sampled=10)}


async def test_the_disk_has_sums_in_place_of_many_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_LINE_BYTES", 2000)
    first = Ledger(tmp_path)
    first.assign("s1", "p")
    for number in range(300):
        await first.count("a", f"s1:train:0:{number}", Used(trained=1))
    await first.count("a", "s1:train:0:7", Used(trained=1))
    assert kept(tmp_path) == {"a/p": Used(trained=300)}
    assert first.today("a") == 300
    files = await asyncio.to_thread(lambda: [path.stat().st_size for path in tmp_path.iterdir()])
    assert sum(files) < 4000


async def test_a_disk_that_takes_nothing_costs_no_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ledger(tmp_path)
    with monkeypatch.context() as broken:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "no space left")

        broken.setattr(Journal, "append", full)
        await first.count("a", "s1:train:0:1", Used(trained=10))
        assert kept(tmp_path) == {}
    await first.count("a", "s1:train:0:2", Used(trained=1))
    assert kept(tmp_path) == {"a": Used(trained=11)}


def line(number: int, account: str = "a/p") -> bytes:
    return b'{"trained":1,"day":"2026-11-29","account":"%s","request":"s1:train:0:%d"}\n' % (account.encode(), number)


@pytest.mark.parametrize("has_sum", [False, True])
def test_a_ledger_of_before_goes_on_in_one_file(tmp_path: Path, has_sum: bool) -> None:
    number, expected = 13 * has_sum, {"a/p": Used(trained=3, seconds=0.5 * has_sum), "b": Used(trained=1)}
    (tmp_path / f"{number}.jsonl").write_bytes(line(2) + line(2) + line(3, "b") + line(4)[:-1])
    if has_sum:
        (tmp_path / "13.json").write_bytes(
            b'{"days":{"2026-11-29":{"a/p":{"trained":2,"seconds":0.5}}},"counted":{"s1:train:0":[[0,1]]}}'
        )
        (tmp_path / "12.jsonl").write_bytes(line(1, "left by a kill"))
    else:
        (tmp_path / "0.jsonl").write_bytes(line(0) + line(1) + (tmp_path / "0.jsonl").read_bytes())
    assert kept(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.journal"]
    asyncio.run(Ledger(tmp_path).count("a", "s1:train:0:2", Used(trained=1)))
    assert kept(tmp_path) == expected


def test_a_damaged_ledger_is_refused_and_left(tmp_path: Path) -> None:
    Ledger(tmp_path)
    path = tmp_path / "ledger.journal"
    for damaged in (path.read_bytes()[:-1], b"{}\n", path.read_bytes() + b"?" * 40):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=str(path)):
            Ledger(tmp_path)
        assert path.read_bytes() == damaged


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
    first = Ledger(tmp_path)
    for number in range(5):
        first.assign(f"s{number}", f"p{number}")
        await first.count("a", f"s{number}:train:0:1", Used(trained=1))
        await first.count("b", f"s{number}:train:0:2", Used(trained=1))
    assert kept(tmp_path)["a"] == Used(trained=2)
    assert len([account for account in kept(tmp_path) if account.startswith("a")]) == 4
    assert first.today("a") == 5
