"""`claim_and_run`: one worker over a list of targets. Any number of workers, on any machines, share only a root.

The order of the targets is in `counterpoint/sweep/target_queue.py`, a claim is in `counterpoint/sweep/lock.py`. This file runs
the body under a claim, in two forms: a function in the caller's thread, and a coroutine in the caller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from counterpoint.sweep.identity import Identity
from counterpoint.sweep.interruption import Interruptions, running_task
from counterpoint.sweep.lease import Done, StaysFailed, TargetHeld, Terms, monotonic
from counterpoint.sweep.lock import (
    REAL_CLOCKS,
    Claim,
    LeaseHolder,
    PreviousTaskFailed,
    describe_holder,
    holding,
    marked_as_held,
    missing_output,
)
from counterpoint.sweep.open_store import open_proven
from counterpoint.sweep.protocol import LeaseLost, Observer, OwnedLease, perform
from counterpoint.sweep.record import RecordError, checked_id
from counterpoint.sweep.store import StoreError
from counterpoint.sweep.target_queue import TargetQueue, WaitSeconds

logger = logging.getLogger(__name__)

UNREACHABLE_LEASES = 10
"""How many leases the storage may be out of reach before a worker that runs nothing ends."""
WAITING_LOG_SECONDS = 60.0
"""Seconds between two log lines that list the targets waited for."""

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)  # with slots, Python 3.11 refuses `SweepTarget[Config](...)`
class SweepTarget(Generic[C]):
    """One thing to run. Raises `ValueError` for an id that is not safe as a file name."""

    target_id: str
    config: C
    """Passed to the body."""
    identity: Any = None
    """What makes it this target, as JSON: that another one with the same id has succeeded is an error. None: the config."""

    def __post_init__(self) -> None:
        checked_id(self.target_id)


class BodyExited(Exception):
    """The error of a body that raised a `BaseException`, such as `SystemExit`, without a stop request to its worker.

    An `Exception` is its own error. The attempt has failed; the exception is the cause.
    """


Call = Callable[[SweepTarget[C], Claim], Any]
Body = Call[C] | Callable[[SweepTarget[C]], Any]
"""Runs a target: a function, or a coroutine function, of the target and, if it takes two arguments, the claim. Its result is
ignored."""


class SweepFailed(ExceptionGroup[Exception]):
    """Raised when all targets have ended and some stay FAILED.

    Holds the errors of this worker's own attempts, `PreviousTaskFailed` for those of others, and `RecordError` for a record
    that cannot be read.
    """


def claim_and_run(
    sweep_root: str | os.PathLike[str],
    targets: Iterable[SweepTarget[C]],
    run_fn: Body[C],
    *,
    force_run_failed: bool = True,
    max_attempts: int | None = None,
    keep_going: bool = False,
    heartbeat: float = 30.0,
    lease: float = 90.0,
) -> None:
    """Runs every target to SUCCESS, each by exactly one worker, and returns when all have succeeded.

    `targets` is any iterable. `run_fn(target, claim)`, or `run_fn(target)` if it takes one argument, is called in this thread;
    a coroutine function runs in a loop of its own. If it raises, the target is marked FAILED and the exception is raised again,
    which ends this worker; the others go on. With `keep_going` this worker goes on, too, and raises at the end. A FAILED target
    is tried again after a pause, with the configuration that it has now, unless `force_run_failed` is false: until it has had
    `max_attempts` in all workers together, or, with None, once by each worker. In the main thread SIGTERM and Ctrl-C interrupt
    the body and give its claim back, before they end this call as `SystemExit` and `KeyboardInterrupt`.

    Raises the body's own exception; `SweepFailed` at the end, when targets stay FAILED; `TypeError` for a body with other
    arguments, and for what is no target; `ValueError` for bad terms, duplicate ids or an invalid root; `UnsafeStoreError` for
    storage without conditional writes; `StoreError` when the storage is unreachable, at the start or for ten leases.
    """
    terms, body = Terms(heartbeat, lease, force_run_failed, max_attempts), _with_both_arguments(run_fn)
    worker = _Worker(sweep_root, _listed(targets), terms, keep_going)
    if inspect.iscoroutinefunction(body):
        return _run_in_loop(worker, body)
    with Interruptions() as interruptions:
        while (step := worker.queue.next()) is not None:
            interruptions.check()
            if isinstance(step, WaitSeconds):
                worker.log_waiting()
                interruptions.sleep(step.seconds)
                continue
            holder_of_lease = worker.acquire(step.target_id)
            if holder_of_lease is not None:
                error = _call(body, worker.targets[step.target_id], holder_of_lease, interruptions)
                interruptions.check()  # before what the body made of a signal is raised
                worker.ended(step.target_id, error)
        interruptions.check()
        worker.raise_failures()


async def claim_and_run_async(
    sweep_root: str | os.PathLike[str],
    targets: Iterable[SweepTarget[C]],
    run_fn: Body[C],
    *,
    force_run_failed: bool = True,
    max_attempts: int | None = None,
    keep_going: bool = False,
    heartbeat: float = 30.0,
    lease: float = 90.0,
) -> None:
    """Does what `claim_and_run` does in a running loop, which is never blocked.

    A lost lease cancels the coroutine; a function runs in a thread, and `claim.stop` is set. Cancelling this call does the
    same, waits for the body's end and gives the claim back. Signals are left to the caller.
    """
    terms = Terms(heartbeat, lease, force_run_failed, max_attempts)
    body = _with_both_arguments(run_fn)
    worker = await _shielded(_Worker, sweep_root, _listed(targets), terms, keep_going)
    with Interruptions(takes_over=False) as interruptions:
        await _drive(worker, body, interruptions)


class _Worker(Generic[C]):
    """What both forms share: the open targets, the claims, and how they ended."""

    def __init__(
        self, root: str | os.PathLike[str], targets: list[SweepTarget[C]], terms: Terms, keep_going: bool
    ) -> None:
        self.targets = {target.target_id: target for target in targets}
        if len(self.targets) != len(targets):
            ids = [target.target_id for target in targets]
            twice = sorted(target_id for target_id in self.targets if ids.count(target_id) > 1)
            raise ValueError(f"targets given more than once: {', '.join(twice)}")
        self.queue = TargetQueue(self.targets, terms.heartbeat, random.Random())
        self._store = open_proven(root)
        self._terms = terms
        self._keep_going = keep_going
        self._observer = Observer(terms, REAL_CLOCKS, self._store.root)
        self._errors: dict[str, Exception] = {}
        """The errors of our own attempts, by target."""
        self._waiting_for: dict[str, str] = {}
        self._logged_at = monotonic()
        self._unreachable_since: float | None = None

    def acquire(self, target_id: str) -> LeaseHolder | None:
        """Returns the claim if it is this worker's now.

        Raises `StoreError` when the storage has been unreachable for too long.
        """
        terms = self._terms
        if terms.max_attempts is None and target_id in self._errors:
            # This worker had its one attempt; that of a peer may still succeed.
            terms = replace(terms, force_run_failed=False)
        try:
            found = perform(self._store, self._observer.acquire(target_id, terms, self._identity(target_id)))
        except StoreError as error:
            self._unreachable(target_id, error)
            return None
        except RecordError as error:
            self.queue.failed(target_id, error)
            return None
        self._unreachable_since = None
        self._waiting_for.pop(target_id, None)
        match found:
            case OwnedLease():
                return LeaseHolder(self._store, found)
            case Done(record):
                if (gone := missing_output(self._store, record)) is not None:
                    logger.warning("%s", gone)
                self.queue.done(target_id)
            case StaysFailed(record):
                previous = PreviousTaskFailed(f"{target_id}: {describe_holder(record)}: {record.error}")
                self.queue.failed(target_id, self._errors.get(target_id, previous))
            case TargetHeld(seconds, record):
                self._waiting_for[target_id] = describe_holder(record)
                self.queue.later(target_id, seconds)
        return None

    def _identity(self, target_id: str) -> Identity:
        target = self.targets[target_id]
        return Identity(target.config if target.identity is None else target.identity)

    def ended(self, target_id: str, error: Exception | None) -> None:
        """Notes how a claim ended. Raises the body's exception, unless this worker is to keep going."""
        if error is None:
            self.queue.done(target_id)
        elif isinstance(error, LeaseLost):
            logger.warning("how its body ended does not count, and the target is checked again: %s", error)
            self.queue.later(target_id, self._terms.heartbeat)
        else:
            logger.error("%s failed: %s: %s", target_id, type(error).__name__, error)
            if not self._keep_going:
                raise error
            self._errors[target_id] = error
            self.queue.later(target_id, 0.0)

    def log_waiting(self) -> None:
        """Logs once a minute which targets peers hold, and which peers."""
        if monotonic() - self._logged_at < WAITING_LOG_SECONDS:
            return
        self._logged_at = monotonic()
        for target_id, whose in self._waiting_for.items():
            logger.info("waiting for %s: %s", target_id, whose)

    def raise_failures(self) -> None:
        """Raises `SweepFailed` if anything stays failed."""
        failures = self.queue.failures
        if failures:
            names = ", ".join(failures)
            raise SweepFailed(
                f"{len(failures)} of {len(self.targets)} targets failed: {names}", list(failures.values())
            )

    def _unreachable(self, target_id: str, error: StoreError) -> None:
        now = monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
            logger.warning("the storage does not answer: %s", error)
        elif now - self._unreachable_since > UNREACHABLE_LEASES * self._terms.lease:
            raise error
        self.queue.later(target_id, self._terms.heartbeat)


def _listed(targets: Iterable[SweepTarget[C]]) -> list[SweepTarget[C]]:
    """Returns the targets of any iterable, which is gone through once. Raises `TypeError` for what is no target."""
    if not isinstance(targets, Iterable):
        raise TypeError(f"targets is {targets!r:.80}; expected a list, or another iterable, of SweepTarget")
    listed = list(targets)
    for target in listed:
        if not isinstance(target, SweepTarget):
            raise TypeError(
                f"targets has {target!r:.80}, of type {type(target).__name__}; expected SweepTarget(target_id, config)"
            )
    return listed


def _with_both_arguments(run_fn: Body[C]) -> Call[C]:
    """Returns the body as a function of target and claim.

    A second parameter with a default does not get the claim, unless it is called `claim`. Raises `TypeError` for a body that
    takes neither one nor two arguments.
    """
    function: Any = run_fn
    parameters = inspect.signature(function).parameters.values()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each for each in positional if each.default is each.empty]
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    needs_more = any(each.kind is each.KEYWORD_ONLY and each.default is each.empty for each in parameters)
    if len(required) > 2 or needs_more or not (positional or takes_any):
        raise TypeError(f"{run_fn!r} takes {len(required)} arguments; expected body(target) or body(target, claim)")
    if takes_any or len(required) == 2 or [each.name for each in positional[1:2]] == ["claim"]:
        return function  # type: ignore[no-any-return]
    if inspect.iscoroutinefunction(function):

        async def coroutine(target: SweepTarget[C], claim: Claim) -> None:
            await function(target)

        return coroutine
    return lambda target, claim: function(target)


def _call(
    run_fn: Call[C], target: SweepTarget[C], holder_of_lease: LeaseHolder, interruptions: Interruptions
) -> Exception | None:
    try:
        with holding(holder_of_lease, interruptions) as claim, interruptions.interruptible(), _contained(interruptions):
            _called(run_fn, target, claim)
    except Exception as error:  # noqa: BLE001 - `holding` has recorded it, and it is raised at the end
        return error
    return None


@contextlib.contextmanager
def _contained(interruptions: Interruptions, is_closed: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raises `BodyExited` instead of an exception that would end the worker without a stop request.

    Otherwise one bad body would end one worker after another. `is_closed` says whether a `GeneratorExit` closes the body.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or interruptions.caused(error, may_be_closed=is_closed()):
            raise
        raise BodyExited(
            f"it raised {type(error).__name__}: {error}; a body must return or raise an Exception"
        ) from error


def _called(run_fn: Call[C], target: SweepTarget[C], claim: Claim) -> None:
    if inspect.isawaitable(run_fn(target, claim)):
        raise TypeError(
            f"{run_fn!r} returned a coroutine that nobody runs: pass a coroutine function (async def) itself"
        )


# --- in a loop ---


async def _drive(worker: _Worker[C], run_fn: Call[C], interruptions: Interruptions) -> None:
    task = asyncio.current_task()
    assert task is not None
    cancelled_before = task.cancelling()
    while True:
        await asyncio.sleep(0)  # where a postponed cancellation is raised
        if task.cancelling() > cancelled_before:
            raise asyncio.CancelledError
        if (step := worker.queue.next()) is None:
            return worker.raise_failures()
        if isinstance(step, WaitSeconds):
            worker.log_waiting()
            await asyncio.sleep(step.seconds)
            continue
        holder_of_lease = await _shielded(worker.acquire, step.target_id)
        if holder_of_lease is not None:
            error = await _run(run_fn, worker.targets[step.target_id], holder_of_lease, interruptions)
            if task.cancelling() > cancelled_before:
                raise asyncio.CancelledError from error  # which the body turned into another exception
            worker.ended(step.target_id, error)


async def _run(
    run_fn: Call[C], target: SweepTarget[C], holder_of_lease: LeaseHolder, interruptions: Interruptions
) -> Exception | None:
    """Does what `_call` and `holding` do, with the body in a task that a lost lease cancels."""
    try:
        try:
            claim = await _shielded(holder_of_lease.begin)
            await asyncio.sleep(0)  # as in `_drive`: a function that has begun cannot be cancelled
            with marked_as_held(claim):
                if inspect.iscoroutinefunction(run_fn):
                    body = partial(run_fn, target, claim)
                    await _cancelled_when_lost(_awaited(body, interruptions), holder_of_lease)
                else:
                    await _run_in_thread(run_fn, target, claim, interruptions)
        except Exception as error:  # noqa: BLE001 - it is recorded, and raised at the end
            await _shielded(holder_of_lease.fail, error)
            return error
        await _shielded(holder_of_lease.succeed)
    except LeaseLost as error:
        return error
    except BaseException:
        await _shielded(holder_of_lease.give_back)
        raise
    return None


async def _awaited(body: Callable[[], Awaitable[Any]], interruptions: Interruptions) -> None:
    """Calls and awaits a body. It is called here since a task that is cancelled before it begins awaits nothing.

    A coroutine is closed from outside, while its task does not run; what is raised while it runs is the body's own.
    """
    task = running_task()
    with _contained(interruptions, is_closed=lambda: running_task() is not task):
        await body()


async def _cancelled_when_lost(body: Awaitable[Any], holder_of_lease: LeaseHolder) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(body)
    holder_of_lease.on_lost(lambda: loop.call_soon_threadsafe(task.cancel))
    try:
        await task
    except asyncio.CancelledError:
        ours = asyncio.current_task()
        if holder_of_lease.lost is not None and ours is not None and not ours.cancelling():
            raise LeaseLost(holder_of_lease.lost) from None
        raise


async def _run_in_thread(run_fn: Call[C], target: SweepTarget[C], claim: Claim, interruptions: Interruptions) -> None:
    """Runs the body in a thread, which cannot be cancelled: sets `claim.stop`, and waits for its end."""

    def call() -> None:
        with _contained(interruptions):
            _called(run_fn, target, claim)

    work = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        claim.stop.set()
        await _wait_shielded(work)
        raise


async def _shielded(function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
    """Returns the function's result, from a thread.

    A cancellation meanwhile is postponed until the result is there, and raised at the next `await`.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **keywords))
    await _wait_shielded(work)
    return work.result()


async def _wait_shielded(work: asyncio.Future[R]) -> None:
    task = asyncio.current_task()
    assert task is not None
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
            task.uncancel()
    if cancelled:
        task.cancel()


def _run_in_loop(worker: _Worker[C], run_fn: Call[C]) -> None:
    """Runs a coroutine for a caller without a loop. Ctrl-C cancels it (by `asyncio.run`), and so does SIGTERM."""
    terminated = False

    async def drive() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            loop.add_signal_handler(signal.SIGTERM, terminate)
        with Interruptions(takes_over=False) as interruptions:
            await _drive(worker, run_fn, interruptions)

    try:
        asyncio.run(drive())
    except asyncio.CancelledError:
        if terminated:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
