"""A claim that is held: kept by heartbeats, watched, and ended with its result; and `step_lock`, the primitive.

There are two threads a claim. One writes heartbeats, and may hang in the storage; the other only watches the clock, so that
the body's `stop` is set in time whatever the storage does. The protocol is `counterpoint/sweep/protocol.py`; many targets are
`counterpoint/sweep/claim.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from counterpoint.sweep.interruption import Interruptions
from counterpoint.sweep.lease import Done, StaysFailed, TargetHeld, Terms, failed, interrupted, monotonic, succeeded
from counterpoint.sweep.open_store import open_proven
from counterpoint.sweep.protocol import Clocks, LeaseLost, Observer, OwnedLease, perform
from counterpoint.sweep.record import Record, RecordError, checked_id
from counterpoint.sweep.store import Store, StoreError, patiently
from counterpoint.sweep.target_queue import Backoff

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""Longest sleep of the watching thread: a sleep may stop while the machine is suspended, the lease does not."""
GIVE_BACK_SECONDS = 10.0
"""How long an interrupted worker tries to give its claim back. After that its lease expires."""

_held: ContextVar[frozenset[str]] = ContextVar("held", default=frozenset())
"""The owners of the claims whose bodies are being run here: in this thread, in a task, or in a thread that either waits for."""

REAL_CLOCKS = Clocks(monotonic, time.time)


class StepAlreadyDone(Exception):
    """The target reads SUCCESS."""


class PreviousTaskFailed(Exception):
    """The target reads FAILED and is not to be tried again."""


class StepHeld(TimeoutError):
    """A peer still held the target at the end of the timeout; or the caller holds it itself, and would wait for ever."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim, as its body gets it."""

    target_id: str
    owner: str
    token: int
    """The fencing token: higher than that of every claim before it. Storage that refuses lower ones than it has seen is safe even
    from a body that does not stop."""
    attempt: int
    """Counting from 1; those that were interrupted do not count."""
    output_path: str = ""
    """The directory of the target's output: `root/target_id`. It exists where the root is a directory."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the body must end: its lease is lost, or its worker is asked to stop. What it does then counts for nothing."""


class LeaseHolder:
    """Keeps one claim until it is ended, by exactly one of `succeed`, `fail` and `give_back`.

    In a forked child these do nothing: the claim is the parent's.
    """

    def __init__(self, store: Store, owned: OwnedLease) -> None:
        record = owned.record
        self.claim = Claim(
            record.target_id, record.owner, record.token, record.attempts, output_path(store, record.target_id)
        )
        self._store = store
        self._owned = owned
        self._process = os.getpid()
        self._writing = threading.Lock()
        """One exchange of the owned at a time."""
        self._changed = threading.Condition()
        self._ending = False
        self._lost: str | None = None
        self._trouble = "none was answered"
        self._on_lost: Callable[[], object] | None = None
        for thread in (self._watch, self._beat):
            # The watching thread comes first: a heartbeat alone would keep a lease that nobody checks.
            threading.Thread(target=thread, name=f"sweep {thread.__name__} {record.target_id}", daemon=True).start()

    def begin(self) -> Claim:
        """Makes the directory of the output, if the root is a directory, and returns the claim for its body."""
        if os.path.isabs(self._store.root):
            os.makedirs(self.claim.output_path, exist_ok=True)
        return self.claim

    @property
    def lost(self) -> str | None:
        """Why the lease is lost; None while it is not."""
        return self._lost

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Sets a `callback`, called from another thread if the lease is lost before the claim is ended."""
        with self._changed:
            self._on_lost = callback
            if self._lost is not None:
                callback()

    def succeed(self) -> None:
        """Ends the claim after the body returned. Raises `LeaseLost` if that does not count."""
        self._end(succeeded, self._owned.terms.lease)
        if (gone := missing_output(self._store, self._owned.record)) is not None:
            logger.warning("%s", gone)

    def fail(self, error: BaseException) -> None:
        """Ends the claim after the body raised. Raises `LeaseLost` if that does not count."""
        text = "".join(
            traceback.format_exception_only(error)
        ).strip()  # copes with an exception that has no text to give
        trace = "".join(traceback.format_exception(error))
        try:
            self._end(lambda record, wall: failed(record, text, trace, wall), self._owned.terms.lease)
        except LeaseLost as lost:
            raise LeaseLost(f"{lost}; its body had raised {text}") from error

    def give_back(self) -> None:
        """Ends the claim after the body was interrupted: a peer may take the target at once.

        Logs errors instead of raising them, since another exception is being raised.
        """
        try:
            self._end(interrupted, min(GIVE_BACK_SECONDS, self._owned.terms.lease))
        except LeaseLost as error:
            logger.warning("an interrupted claim was not given back: %s", error)

    def _end(self, transition: Callable[[Record, float], Record], patience: float) -> None:
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._lost is not None:
                raise LeaseLost(self._lost)
            self._ending = True
            self._changed.notify_all()
        # From here on `stop` is not set any more: the body has ended, and the store decides whether it counts.
        give_up = monotonic() + patience
        if not self._writing.acquire(timeout=patience):
            raise LeaseLost(f"{self.claim.target_id}: the storage has not answered for {patience:g} s")
        try:
            perform(self._store, self._owned.end(transition, give_up - monotonic()))
        except (StoreError, RecordError) as error:
            raise LeaseLost(f"{self.claim.target_id}: how it ended could not be written: {error}") from error
        finally:
            self._writing.release()

    # --- the two threads ---

    def _beat(self) -> None:
        while self._wait_until_due():
            try:
                with self._writing:
                    if not self._ending:
                        perform(self._store, self._owned.beat())
                        logger.debug("%s: heartbeat %d", self.claim.target_id, self._owned.record.revision)
            except LeaseLost as error:
                return self._lose(str(error))
            except StoreError as error:
                # The next one follows at once; the watching thread knows when it is too late.
                self._trouble = str(error)
            except BaseException as error:
                logger.exception("%s: the heartbeat failed", self.claim.target_id)
                return self._lose(f"{self.claim.target_id}: the heartbeat failed: {error!r}")

    def _wait_until_due(self) -> bool:
        """Waits until the next heartbeat is due; False when the claim has ended or is lost."""
        with self._changed:
            due = self._owned.confirmed_at + self._owned.terms.heartbeat
            self._changed.wait_for(lambda: self._over, max(0.0, due - monotonic()))
            return not self._over

    @property
    def _over(self) -> bool:
        return self._ending or self._lost is not None

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._over:
                    return
                remaining = self._owned.deadline - monotonic()
                if remaining > 0:
                    self._changed.wait(min(remaining, WATCH_SECONDS))
                    continue
            safe = self._owned.terms.safe_seconds
            return self._lose(
                f"{self.claim.target_id}: no heartbeat was confirmed for {safe:g} s, so that a peer may take it soon; "
                f"the last error: {self._trouble}"
            )

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._over:
                return
            self._lost = reason
            self._changed.notify_all()
            self.claim.stop.set()
            if self._on_lost is not None:
                self._on_lost()
        logger.warning("lease lost: %s", reason)


@contextlib.contextmanager
def marked_as_held(claim: Claim) -> Iterator[None]:
    """Lets a `step_lock` inside the block see that its caller holds this claim."""
    _held.set(_held.get() | {claim.owner})
    try:
        yield
    finally:
        _held.set(_held.get() - {claim.owner})


@contextlib.contextmanager
def holding(holder_of_lease: LeaseHolder, interruptions: Interruptions) -> Iterator[Claim]:
    """Yields the claim, and ends it with the block.

    SUCCESS when the block ends, given back when it is interrupted, FAILED when it raises anything else; the exception goes
    on. Raises `LeaseLost` if the block ended too late to count.
    """
    try:
        claim = holder_of_lease.begin()
        with marked_as_held(claim):
            yield claim
    except BaseException as error:
        if interruptions.caused(error):
            holder_of_lease.give_back()
        else:
            holder_of_lease.fail(error)
        raise
    holder_of_lease.succeed()


@contextlib.contextmanager
def step_lock(
    path: str | os.PathLike[str],
    label: str | None = None,
    *,
    force_run_failed: bool = True,
    max_attempts: int | None = None,
    heartbeat: float = 30.0,
    lease: float = 90.0,
    timeout: float | None = None,
) -> Iterator[Claim]:
    """Runs its block as the only one for `path`: the last part is the target's id, the rest the sweep's root.

    `label` names it in the log and in errors; without one, its path does.
    Waits, with jitter, while a peer holds the target: at most `timeout` seconds, or as long as the peer keeps its lease. A
    line of the log names the peer. Raises `StepAlreadyDone` and `PreviousTaskFailed`; `StepHeld` after `timeout`, and at once
    for a target that the caller itself holds; `StoreError` when the storage cannot be reached for some seconds; at the block's
    end as `holding` does.
    """
    root, target_id = os.path.split(os.fspath(path))
    name = os.fspath(path) if label is None else f"{label} ({os.fspath(path)})"
    terms = Terms(heartbeat, lease, force_run_failed, max_attempts)
    checked_id(target_id)
    store = open_proven(root or ".")
    observer = Observer(terms, REAL_CLOCKS, store.root)
    backoff = Backoff(heartbeat, random.Random())
    give_up = None if timeout is None else monotonic() + timeout
    waits = False
    while isinstance(found := patiently(lambda: perform(store, observer.acquire(target_id))), TargetHeld):
        if found.record.owner in _held.get() and found.record.pid == os.getpid():
            raise StepHeld(f"{name}: {describe_holder(found.record)}, which is this caller: it would wait for itself")
        remaining = float("inf") if give_up is None else give_up - monotonic()
        if remaining <= 0:
            raise StepHeld(f"{name}: {describe_holder(found.record)}, and {timeout:g} s to wait are over")
        if not waits:
            logger.warning("waiting for %s: %s", name, describe_holder(found.record))
            waits = True
        time.sleep(min(remaining, backoff.next_pause(1, found.seconds)))
    match found:
        case Done(record):
            gone = missing_output(store, record)
            raise StepAlreadyDone(f"{name}: {describe_holder(record)}" + (f"; {gone}" if gone else ""))
        case StaysFailed(record):
            raise PreviousTaskFailed(f"{name}: {describe_holder(record)}: {record.error}")
        case OwnedLease():
            with (
                Interruptions(takes_over=False) as interruptions,
                holding(LeaseHolder(store, found), interruptions) as claim,
            ):
                yield claim


def describe_holder(record: Record) -> str:
    """Describes who holds or held a target, for a person."""
    return f"{record.state} by process {record.pid} on {record.host}, attempt {record.attempts}, token {record.token}"


def missing_output(store: Store, record: Record) -> str | None:
    """Returns, for a person, that somebody deleted the directory of the output of a target that reads SUCCESS; None if not."""
    path = output_path(store, record.target_id)
    if not os.path.isabs(store.root) or os.path.isdir(path):
        return None
    return (
        f"{record.target_id} reads SUCCESS, but the directory of its output, {path}, is not there any more; move its record "
        f"{path}.json away to run it afresh"
    )


def output_path(store: Store, target_id: str) -> str:
    """Returns where a target's output belongs."""
    return f"{store.root.rstrip('/')}/{target_id}"
