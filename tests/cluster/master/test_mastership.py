"""The lease of a master: one at a time, the epoch rises, and the lease of a dead one is free at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint.cluster.master.mastership import Identity, MasterHeld, Mastership, acquire, terms_of
from counterpoint.sweep.lease import Terms
from counterpoint.sweep.store import Stored, StoreError
from counterpoint.sweep.stores.local import LocalStore

TERMS = Terms(heartbeat=30.0, lease=90.0)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "journal")


@pytest.fixture
def held(store: LocalStore) -> Iterator[Mastership]:
    mastership = acquire(store, TERMS, patience=0, give_up=threading.Event())
    yield mastership
    mastership.give_back()


def test_there_is_one_master_at_a_time(store: LocalStore, held: Mastership) -> None:
    assert held.epoch == 1
    with pytest.raises(MasterHeld, match="the job has another master: RUNNING by process"):
        acquire(store, TERMS, patience=0, give_up=threading.Event())
    held.give_back()
    later = acquire(store, TERMS, patience=0, give_up=threading.Event())
    assert later.epoch == 2
    later.give_back()


def test_a_waiting_master_can_be_told_to_give_up(store: LocalStore, held: Mastership) -> None:
    give_up = threading.Event()
    give_up.set()
    with pytest.raises(MasterHeld):
        acquire(store, TERMS, patience=1000, give_up=give_up)


def test_the_lease_of_a_dead_process_is_free_at_once(store: LocalStore, held: Mastership) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    identity = replace(Identity.of_this_process(), pid=ended.pid, started=1)
    ended.wait()
    assert identity.is_dead()
    pretended = replace(Identity.of_this_process(), started=1)  # the record has this process's id
    with pytest.raises(MasterHeld):  # a later epoch than that of the dead one
        acquire(store, TERMS, patience=0, give_up=threading.Event(), predecessor=lambda: (7, pretended))
    later = acquire(store, TERMS, patience=0, give_up=threading.Event(), predecessor=lambda: (1, pretended))
    assert later.epoch == 2
    later.give_back()


def test_a_living_process_or_one_of_another_machine_is_not_dead() -> None:
    here = Identity.of_this_process()
    assert not here.is_dead()
    assert not replace(here, machine="elsewhere", started=1).is_dead()


def test_a_storage_that_does_not_answer_is_named(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: LocalStore, key: str) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(LocalStore, "read", read)
    with pytest.raises(StoreError, match="the disk is gone"):
        acquire(store, TERMS, patience=0, give_up=threading.Event())


def test_the_mastership_leaves_the_agents_time(store: LocalStore) -> None:
    terms = terms_of(10.0, store)
    assert (terms.lease, terms.heartbeat) == (4.0, 0.8)


def test_a_claim_of_ones_own_that_was_confirmed_too_late_is_no_other_master(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that was full: whether the claim is written was not known in time, and it was."""
    terms = Terms(heartbeat=0.1, lease=0.3)
    acquire(store, terms, patience=0, give_up=threading.Event()).give_back()
    read, write = LocalStore.read, LocalStore.write
    begun: list[float] = []

    def write_unanswered(self: LocalStore, key: str, data: bytes, version: str | None) -> str:
        result = write(self, key, data, version)
        if not begun:
            begun.append(time.monotonic())
            raise StoreError("no answer")
        return result

    def read_later(self: LocalStore, key: str) -> Stored | None:
        if begun and time.monotonic() - begun[0] < terms.safe_seconds:
            raise StoreError("no answer")
        return read(self, key)

    monkeypatch.setattr(LocalStore, "write", write_unanswered)
    monkeypatch.setattr(LocalStore, "read", read_later)
    again = acquire(store, terms, patience=60, give_up=threading.Event(), former_epoch=1)
    assert again.epoch == 3, "the second claim was its own, too, and had to expire"
    again.give_back()
    other = acquire(store, terms, patience=60, give_up=threading.Event())
    with pytest.raises(MasterHeld, match="another master has taken over"):
        acquire(store, terms, patience=60, give_up=threading.Event(), former_epoch=3)
    other.give_back()
