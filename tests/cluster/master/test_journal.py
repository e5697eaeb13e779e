"""The journal with one master: what is appended is read, damage is found and explained, snapshots bound its length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.cluster.errors import StaleMasterError
from counterpoint.cluster.master import journal as journal_module
from counterpoint.cluster.master.journal import History, Journal
from counterpoint.cluster.master.journal_format import (
    Entry,
    EntryTooLarge,
    JournalError,
    entry_key,
    entry_of_bytes,
    to_bytes,
)
from counterpoint.sweep.protocol import Write, answer_of, perform
from counterpoint.sweep.store import Store, StoreError
from counterpoint.sweep.stores.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "journal")


def begin(history: History) -> list[dict[str, Any]]:
    return [{"kind": "Opened", "after": history.last}]


def opened(store: Store, epoch: int) -> tuple[Journal, History]:
    journal = Journal(store.root, epoch)
    return journal, perform(store, journal.open(begin, give_up=0))


def test_what_is_appended_is_read_in_order(store: LocalStore) -> None:
    first, history = opened(store, 1)
    assert (history.last, [entry.opening for entry in history.entries]) == (1, [True])
    perform(store, first.append([{"a": 1}, {"a": 2}], {"node": {"pid": 5}}))
    perform(store, first.append([], {"node": None, "other": 1}))
    _, history = opened(store, 3)
    assert [entry.epoch for entry in history.entries] == [1, 1, 1, 3]
    assert history.entries[1].events == [{"a": 1}, {"a": 2}]
    assert history.handles == {"other": 1}
    assert history.openings == [1, 4]


def test_an_earlier_master_cannot_append_after_a_later_one(store: LocalStore) -> None:
    first, _ = opened(store, 1)
    opened(store, 2)
    with pytest.raises(StaleMasterError, match="epoch 2 has taken the journal over"):
        perform(store, first.append([{"a": 1}]))
    with pytest.raises(StaleMasterError, match="this one has epoch 1"):
        opened(store, 1)


def test_a_snapshot_replaces_the_entries_before_it(store: LocalStore) -> None:
    journal, _ = opened(store, 1)
    for number in range(5):
        perform(store, journal.append([{"n": number}], {"count": number}))
    perform(store, journal.write_snapshot(journal.take_snapshot({"sum": 10})))
    perform(store, journal.append([{"n": 9}]))
    assert sorted(store.keys()) == [entry_key(1), entry_key(7), "snapshot-000000000006"]
    _, history = opened(store, 2)
    assert history.snapshot is not None
    assert (history.snapshot.state, history.handles, history.openings) == ({"sum": 10}, {"count": 4}, [1, 8])
    assert [list(entry.events) for entry in history.entries] == [[{"n": 9}], [{"kind": "Opened", "after": 7}]]


def test_a_later_snapshot_stands_alone_and_keeps_the_openings(store: LocalStore) -> None:
    for epoch in (1, 2, 3):
        journal, _ = opened(store, epoch)
        perform(store, journal.append([{"n": epoch}]))
        perform(store, journal.write_snapshot(journal.take_snapshot({"epoch": epoch})))
    assert sorted(store.keys()) == [entry_key(1), entry_key(3), entry_key(5), "snapshot-000000000006"]


def test_a_snapshot_is_due_after_so_many_entries(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ENTRIES_BEFORE_SNAPSHOT", 3)
    journal, _ = opened(store, 1)
    for due in (False, True, True):
        perform(store, journal.append([{}]))
        assert journal.snapshot_is_due == due
    perform(store, journal.write_snapshot(journal.take_snapshot({"long": "x" * 2000})))
    for _ in range(3):
        perform(store, journal.append([{}]))
    assert not journal.snapshot_is_due  # they are smaller together than the snapshot


def test_an_event_that_is_too_large_writes_nothing(store: LocalStore) -> None:
    journal, _ = opened(store, 1)
    with pytest.raises(EntryTooLarge, match=r"entry 2 has .* bytes; at most 262144"):
        perform(store, journal.append([{"reason": "x" * 300_000}]))
    assert perform(store, journal.append([{"a": 1}])).number == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "torn"),
        (lambda data: data.replace(b'"n":2', b'"n":3'), "checksum"),
        (lambda data: b"", "no JSON"),
        (lambda data: b"[1]\n{}\n", "format 1"),
    ],
)
def test_a_damaged_entry_is_named(store: LocalStore, damage: Any, message: str) -> None:
    journal, _ = opened(store, 1)
    for number in (1, 2, 3):
        perform(store, journal.append([{"n": number}]))
    path = Path(store.root) / f"{entry_key(3)}.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(JournalError, match=rf"entry-000000000003 of the journal is damaged.*{message}.*restore"):
        opened(store, 2)


@given(place=st.integers(0, 400), by=st.integers(1, 255), kept=st.integers(0, 400))
def test_an_entry_cut_at_any_byte_or_with_any_byte_altered_is_refused(place: int, by: int, kept: int) -> None:
    entry = Entry(7, 3, False, [{"kind": "Tick", "at": 2.5}, {"kind": "Begin", "at": 0.0}], {"node": {"pid": 5}})
    whole = to_bytes(entry)
    assert entry_of_bytes(whole, 7, "place") == entry
    altered = bytearray(whole)
    altered[place % len(whole)] ^= by
    for damaged in (bytes(altered), whole[: kept % (len(whole) - 1)]):  # without the last line end it is still whole
        with pytest.raises(JournalError, match="entry-000000000007"):
            entry_of_bytes(damaged, 7, "place")


def test_a_missing_entry_is_named(store: LocalStore) -> None:
    journal, _ = opened(store, 1)
    for number in (1, 2, 3):
        perform(store, journal.append([{"n": number}]))
    store.discard(entry_key(3))
    with pytest.raises(JournalError, match=r"entry-000000000003 .*missing, .*entry-000000000004"):
        opened(store, 2)


def test_an_entry_that_may_be_written_is_retried_with_the_same_bytes(store: LocalStore) -> None:
    class Full(LocalStore):
        full, lost = True, False

        def write(self, key: str, data: bytes, version: str | None) -> str:
            if self.full:
                raise StoreError("no space left on device")
            written = super().write(key, data, version)
            if self.lost:
                raise StoreError("the answer was lost")
            return written

    journal, _ = opened(store, 1)
    full = Full(Path(store.root))
    for _ in range(2):
        with pytest.raises(StoreError, match="is not known to be written: no space left"):
            perform(full, journal.append([{"a": 1}], give_up=0) if not journal.has_pending else journal.retry(0))
    assert journal.has_pending
    full.full, full.lost = False, True
    assert perform(full, journal.retry(0)).number == 2
    assert not journal.has_pending
    _, history = opened(store, 2)
    assert history.entries[1].events == [{"a": 1}]


def test_a_master_that_reads_for_too_long_does_not_append_where_others_have_discarded(store: LocalStore) -> None:
    """It has read up to an entry; others append, a later master opens, takes a snapshot and discards; then it goes on."""
    first, _ = opened(store, 1)
    slow = Journal(store.root, 2)
    opening = slow.open(begin, give_up=0)
    request = next(opening)
    while not isinstance(request, Write):
        request = opening.send(answer_of(store, request))
    perform(store, first.append([{"n": 2}]))
    perform(store, first.append([{"n": 3}]))
    last, _ = opened(store, 3)
    perform(store, last.write_snapshot(last.take_snapshot({"sum": 5})))
    assert store.read(request.key) is None
    with pytest.raises(StaleMasterError, match="epoch 3"):  # noqa: PT012 - one exchange
        while True:
            request = opening.send(answer_of(store, request))
    _, history = opened(store, 4)
    assert history.snapshot is not None
    assert history.openings == [1, 4, 5]
