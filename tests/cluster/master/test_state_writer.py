"""The state of a job in its file: no write is lost or torn, two masters never both write, and damage is refused by name."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.cluster.errors import ClusterError, StaleMasterError
from counterpoint.cluster.job_files import STATE_FILE
from counterpoint.cluster.manager.state import JobState, first_state
from counterpoint.cluster.master import state_writer
from counterpoint.cluster.master.state_writer import KEY, NotWritten, StateWriter, open_state
from counterpoint.cluster.state_file import (
    MOST_CHANGES,
    ChangeLog,
    MasterState,
    StateError,
    of_bytes,
    read_state,
    to_bytes,
)
from counterpoint.sweep.store import Store, StoreError
from counterpoint.sweep.stores.memory import MemoryStore
from counterpoint.transport.files.atomic import write_atomically
from tests.cluster.manager.test_any_order import SPECS


def job() -> JobState:
    return first_state(SPECS[0])


def writer(store: Store) -> StateWriter:
    found = StateWriter(store)
    found.read()
    return found


async def write(state: StateWriter, epoch: int, at: float = 0.0, **handles: Any) -> None:
    await state.write(epoch, at, job(), handles, ())


@pytest.fixture(params=["file", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_state(tmp_path, None) if request.param == "file" else MemoryStore(str(tmp_path))


async def test_each_write_counts_and_is_what_is_read(store: Store) -> None:
    first = writer(store)
    assert first.saved is None
    for number in (1, 2, 3):
        await write(first, 1, float(number), a=number)
    again = StateWriter(store).read()
    assert again == MasterState(1, 3, 3.0, job(), {"a": 3}, ())


async def test_a_master_that_was_frozen_while_another_took_over_stops_at_its_next_write(store: Store) -> None:
    frozen = writer(store)
    await write(frozen, 1)
    other = writer(store)
    assert not frozen.is_replaced()
    await write(other, 2)
    assert frozen.is_replaced()
    with pytest.raises(StaleMasterError, match="epoch 2"):
        await write(frozen, 1)
    await write(other, 2, 7.0)
    assert (other.epoch, other.number) == (2, 3)


async def test_of_two_that_begin_at_once_in_a_bucket_one_is_the_first() -> None:
    """Two of one machine are kept apart by the lock."""
    store = MemoryStore("two at once")
    both = [writer(store), writer(store)]
    results = await asyncio.gather(*(write(one, 1, float(at)) for at, one in enumerate(both)), return_exceptions=True)
    assert [type(one) for one in results if one is not None] == [StaleMasterError]


async def test_a_state_that_was_removed_ends_its_master(tmp_path: Path) -> None:
    state = writer(open_state(tmp_path, None))
    await write(state, 1)
    (tmp_path / STATE_FILE).unlink()
    with pytest.raises(StaleMasterError, match="was removed"):
        await write(state, 1)


async def test_an_answer_that_is_lost_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore("lost answer")
    state, true_write, lost = writer(store), MemoryStore.write, 3

    def unanswered(self: MemoryStore, key: str, data: bytes, version: str | None) -> str:
        nonlocal lost
        result = true_write(self, key, data, version)
        if lost:
            lost -= 1
            raise StoreError("no answer")
        return result

    monkeypatch.setattr(MemoryStore, "write", unanswered)
    for number in range(5):
        await write(state, 1, float(number))
    assert StateWriter(store).read() == MasterState(1, 5, 4.0, job(), {}, ())


async def test_a_write_that_is_cancelled_is_over_when_its_master_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would come after another master has taken the lock."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **named: Any) -> None:
        begun.set()
        go_on.wait(60)
        write_atomically(*arguments, **named)

    monkeypatch.setattr(state_writer, "write_atomically", slow)
    running = asyncio.create_task(write(writer(open_state(tmp_path, None)), 1))
    assert await asyncio.to_thread(begun.wait, 60)
    running.cancel()
    await asyncio.wait([running], timeout=0.05)
    assert not running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert read_state(tmp_path).number == 1


async def test_a_storage_that_fails_is_waited_for_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_writer, "TRY_SECONDS", 0.01)
    told: list[str] = []
    state = writer(open_state(tmp_path, None))
    state.report = told.append
    failures = 3

    def full(*arguments: Any, **named: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(28, "No space left on device")
        write_atomically(*arguments, **named)

    monkeypatch.setattr(state_writer, "write_atomically", full)
    await write(state, 1)
    assert [trouble.partition(":")[0] for trouble in told] == [f"disk full at {tmp_path}", ""]
    assert read_state(tmp_path).epoch == 1
    failures, state.gives_up = 1000, True
    with pytest.raises(NotWritten, match="No space left"):
        await write(state, 1)
    assert read_state(tmp_path).number == 1


async def test_a_state_that_is_too_large_is_refused_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_writer, "LARGEST_OBJECT_BYTES", 100)
    state = writer(MemoryStore("too large"))
    with pytest.raises(ClusterError, match="at most 100 can be kept there"):
        await write(state, 1)
    assert state.number == 0


@settings(max_examples=200, deadline=None)
@given(
    at=st.integers(0, 10_000), byte=st.integers(0, 255), kind=st.sampled_from(["cut", "changed", "removed", "added"])
)
def test_damage_is_refused_by_name_or_changes_nothing(at: int, byte: int, kind: str) -> None:
    saved = MasterState(3, 7, 12.5, job(), {"here": {"pid": 1}}, ())
    data = to_bytes(saved)
    at %= len(data)
    damaged = {
        "cut": data[:at],
        "changed": data[:at] + bytes([byte]) + data[at + 1 :],
        "removed": data[:at] + data[at + 1 :],
        "added": data[:at] + bytes([byte]) + data[at:],
    }[kind]
    said = ""
    try:
        found = of_bytes(damaged, "dir/state.json")
    except StateError as error:
        said, found = str(error), saved
    assert found == saved
    assert not said or (said.startswith("dir/state.json cannot be read: ") and len(said) < 1000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "a newer version of Counterpoint wrote it"),
        ({"format": None}, "expected the number 1"),
        ({"crc32": 5}, "not those that were written"),
        ({"saved": []}, "saved"),
    ],
)
def test_what_is_another_file_is_said(change: dict[str, Any], says: str) -> None:
    data = orjson.loads(to_bytes(MasterState(1, 1, 0.0, job()))) | change
    with pytest.raises(StateError, match=says):
        of_bytes(orjson.dumps(data), "state.json")


async def test_what_killed_masters_did_not_write_whole_is_no_state_and_is_removed(tmp_path: Path) -> None:
    """Any prefix of writes, and a torn file beside it: the state is that of the last whole write."""
    state = writer(open_state(tmp_path, None))
    for number in range(4):
        torn = tmp_path / f".{STATE_FILE}.{os.getpid()}-{number}.partial"
        torn.write_bytes(to_bytes(MasterState(9, 9, 9.0, job()))[: 100 * number])
        later = writer(open_state(tmp_path, None))
        assert (later.epoch, later.number) == ((1, number) if number else (0, 0))
        assert not torn.exists()
        await write(state, 1)


async def test_the_file_is_its_users_alone_and_links_are_not_followed(tmp_path: Path) -> None:
    state = writer(open_state(tmp_path, str(tmp_path / "elsewhere")))
    await write(state, 1)
    path = tmp_path / "elsewhere" / STATE_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(StateError, match=r"elsewhere/state\.json"):
        StateWriter(open_state(tmp_path, str(tmp_path / "elsewhere"))).read()
    with pytest.raises(StateError, match=r"elsewhere/state\.json"):
        read_state(tmp_path / "elsewhere")


def test_only_the_newest_changes_are_kept() -> None:
    state = job()
    log = ChangeLog(state)
    worker = next(iter(state.workers.values()))
    for number in range(MOST_CHANGES + 3):
        worker.incarnation = number + 1
        log.note([worker.name], "created", "", float(number))
    assert len(log.changes) == MOST_CHANGES
    assert [log.changes[at].incarnation for at in (0, -1)] == [4, MOST_CHANGES + 3]
    log.note([worker.name], "nothing", "", 0.0)
    assert log.changes[-1].cause == "created"


def test_a_root_names_a_bucket_or_a_directory(tmp_path: Path) -> None:
    assert open_state(tmp_path, "memory://here").root == "memory://here"
    assert open_state(tmp_path, None).root == str(tmp_path)
    assert open_state(tmp_path, str(tmp_path / "other")).root == str(tmp_path / "other")
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o700


def test_a_store_holds_one_object(tmp_path: Path) -> None:
    store = open_state(tmp_path, None)
    assert store.keys() == []
    store.write(KEY, b"1", None)
    assert store.keys() == [KEY]
    store.discard(KEY)
    assert store.keys() == []
