"""Who is the master: a lease of `sweep` beside the journal, whose fencing token is the epoch.

The lease decides who acts; it does not have to be trusted. A master that has lost it without noticing is refused by the
agents and by the journal, which both know a higher epoch by then. So a lease may be freed early, once its holder is seen to
be dead on this machine: a killed master is replaced within a second, and not only after its lease.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from counterpoint.cluster.agent.remains import start_of
from counterpoint.cluster.errors import ClusterError
from counterpoint.sweep.lease import Done, Held, StaysFailed, Terms, interrupted
from counterpoint.sweep.lock import REAL_CLOCKS, LeaseHolder, describe_holder
from counterpoint.sweep.protocol import Observer, OwnedLease, perform
from counterpoint.sweep.record import Record, State
from counterpoint.sweep.store import Conflict, Store, StoreError

logger = logging.getLogger(__name__)

TARGET = "master"
"""The lease's name in the journal's store."""

MASTER_SHARE = 0.4
"""The mastership's lease as a share of the job's: a new master has the rest of it to reach the agents, which then stop."""

BEATS = 5
"""Heartbeats in one lease of the mastership."""

LOOK_SECONDS = 0.2
"""Seconds between two looks of a waiting master."""


class MasterHeld(ClusterError):
    """Another master keeps the job."""


def terms_of(lease_seconds: float, store: Store) -> Terms:
    """Returns the terms of the mastership of a job whose agents live so long without a master."""
    lease = lease_seconds * MASTER_SHARE
    return Terms(heartbeat=max(lease / BEATS, store.write_interval), lease=lease)


@dataclass(frozen=True, slots=True)
class Identity:
    """A process of this machine, so that it is not taken for another with the same id."""

    machine: str
    """Which boot of which machine, and which space of process ids."""
    pid: int
    started: int
    """The start of the process, in clock ticks since the boot."""

    @classmethod
    def of_this_process(cls) -> Identity:
        """Returns the caller's own."""
        return cls(_machine(), os.getpid(), start_of(os.getpid()) or 0)

    def is_dead(self) -> bool:
        """Whether the process has surely ended. False if it cannot be told from here."""
        return self.machine == _machine() and start_of(self.pid) != self.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class Mastership:
    """The lease, while this process holds it. Its heartbeats are written by a thread of `sweep`'s."""

    def __init__(self, store: Store, owned: OwnedLease) -> None:
        self.epoch = owned.record.token
        self._holder = LeaseHolder(store, owned, logging.INFO)  # what follows from a loss is for the process to say

    @property
    def lost(self) -> str | None:
        """Why it is lost; None while this process may act."""
        return self._holder.lost

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Sets what is called, from another thread, when it is lost."""
        self._holder.on_lost(callback)

    def give_back(self) -> None:
        """Lets another master begin at once. Blocks for a moment; logs errors."""
        if self._holder.lost is None:
            self._holder.give_back()


def acquire(
    store: Store,
    terms: Terms,
    *,
    patience: float,
    give_up: threading.Event,
    predecessor: Callable[[], tuple[int, Identity] | None] = lambda: None,
    former_epoch: int = 0,
) -> Mastership:
    """Takes the lease; waits while another master keeps it, for `patience` seconds. Blocks.

    `predecessor` returns the last master's epoch and process, if they are known; `former_epoch` is this process's own, if it
    was the master before. Raises `MasterHeld` when the patience ends, or `give_up` is set, or another was the master since;
    `StoreError` if the storage did not answer for as long.
    """
    observer = Observer(terms, REAL_CLOCKS, store.root)
    deadline, draw = time.monotonic() + patience, random.Random()
    while True:
        trouble: StoreError | None = None
        found: OwnedLease | Held | Done | StaysFailed | None = None
        try:
            record = _record(store) if former_epoch else None
            if record is not None and record.token > former_epoch and record.owner not in observer.owners:
                raise MasterHeld(f"{store.root}: another master has taken over: {describe_holder(record)}")
            if (known := predecessor()) is not None and known[1].is_dead():
                _free(store, *known)
            found = perform(store, observer.acquire(TARGET))
        except StoreError as error:
            trouble = error
        if isinstance(found, OwnedLease):
            return Mastership(store, found)
        if give_up.is_set() or time.monotonic() >= deadline:
            if trouble is not None:
                raise trouble
            who = describe_holder(found.record) if found is not None else "nobody"
            raise MasterHeld(f"{store.root}: the job has another master: {who}")
        give_up.wait(min(LOOK_SECONDS, terms.lease / 4) * draw.uniform(0.5, 1.0))


def _free(store: Store, epoch: int, dead: Identity) -> None:
    """Gives the lease of a dead master back in its name, if it still holds it."""
    stored = store.read(TARGET)
    if stored is None:
        return
    record = Record.of_bytes(stored.data, TARGET, store.root)
    if record.state is not State.RUNNING or (record.token, record.pid) != (epoch, dead.pid):
        return
    with contextlib.suppress(Conflict):  # Somebody was quicker.
        store.write(TARGET, interrupted(record, time.time()).to_bytes(), stored.version)
        logger.info("the master with epoch %d, process %d, is dead; its lease is free", epoch, dead.pid)


def _record(store: Store) -> Record | None:
    stored = store.read(TARGET)
    return None if stored is None else Record.of_bytes(stored.data, TARGET, store.root)
