"""One worker's walk over targets, with functions and coroutines: what is skipped, tried again, given back and raised."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import threading
from collections import deque, namedtuple
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from counterpoint import sweep
from counterpoint.sweep.claim import BodyExited, SweepFailed, SweepTarget, claim_and_run, claim_and_run_async
from counterpoint.sweep.identity import Identity
from counterpoint.sweep.lease import Terms
from counterpoint.sweep.lock import REAL_CLOCKS, Claim, LeaseHolder, PreviousTaskFailed, StepAlreadyDone, step_lock
from counterpoint.sweep.open_store import open_store
from counterpoint.sweep.protocol import Observer, OwnedLease, perform
from counterpoint.sweep.status import sweep_status
from counterpoint.sweep.store import StoreError
from counterpoint.sweep.stores.memory import MemoryStore

DEADLINE_SECONDS = 60.0
_numbers = itertools.count()

QUICK: dict[str, Any] = {"heartbeat": 0.02, "lease": 30.0}


@pytest.fixture
def root() -> str:
    return f"memory://claim-{next(_numbers)}"


def targets(*ids: str) -> list[SweepTarget[int]]:
    return [SweepTarget(target_id, index) for index, target_id in enumerate(ids)]


def states(root: str) -> dict[str, tuple[str, int]]:
    return {found.target_id: (found.state, found.attempts) for found in sweep_status(root)}


def in_a_loop(*arguments: Any, **keywords: Any) -> None:
    """The async form, as the sync form is called."""
    asyncio.run(claim_and_run_async(*arguments, **keywords))


both_forms = pytest.mark.parametrize("run", [claim_and_run, in_a_loop])


@both_forms
@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_targets_run_in_order_each_once_with_their_config(root: str, run: Callable[..., None], kind: str) -> None:
    seen: list[tuple[str, int, int, int]] = []

    def function(target: SweepTarget[int], claim: Claim) -> None:
        seen.append((target.target_id, target.config, claim.token, claim.attempt))

    async def coroutine(target: SweepTarget[int], claim: Claim) -> None:
        await asyncio.sleep(0)
        function(target, claim)

    for _ in range(2):
        run(root, targets("b", "a", "c"), function if kind == "function" else coroutine)
    assert seen == [("b", 0, 1, 1), ("a", 1, 1, 1), ("c", 2, 1, 1)]
    assert states(root) == {"a": ("SUCCESS", 1), "b": ("SUCCESS", 1), "c": ("SUCCESS", 1)}


@both_forms
def test_the_bodys_exception_ends_its_worker_and_a_peer_tries_the_target_again(
    root: str, run: Callable[..., None]
) -> None:
    tried: list[str] = []
    error = RuntimeError("out of luck")

    def body(target: SweepTarget[int], claim: Claim) -> None:
        tried.append(target.target_id)
        if tried == ["good", "bad"]:
            raise error

    with pytest.raises(RuntimeError) as raised:
        run(root, targets("good", "bad", "fine"), body, **QUICK)
    assert raised.value is error
    assert states(root) == {"good": (sweep.STATUS_SUCCESS, 1), "bad": (sweep.STATUS_FAILED, 1)}
    run(root, targets("good", "bad", "fine"), body, **QUICK)
    assert sorted(tried) == ["bad", "bad", "fine", "good"]
    assert set(states(root).values()) == {(sweep.STATUS_SUCCESS, 1), (sweep.STATUS_SUCCESS, 2)}


@both_forms
def test_each_target_has_a_directory_for_its_output_below_the_root(tmp_path: Path, run: Callable[..., None]) -> None:
    def body(target: SweepTarget[int], claim: Claim) -> None:
        (Path(claim.output_path) / "result").write_text(target.target_id)

    run(tmp_path, targets("lr=0.1, wd=0", "größer"), body, **QUICK)
    assert (tmp_path / "lr=0.1, wd=0" / "result").read_text() == "lr=0.1, wd=0"
    assert states(str(tmp_path)) == {"lr=0.1, wd=0": ("SUCCESS", 1), "größer": ("SUCCESS", 1)}


@both_forms
def test_a_failing_target_is_tried_up_to_its_limit_and_the_rest_go_on(root: str, run: Callable[..., None]) -> None:
    tried: list[str] = []

    def body(target: SweepTarget[int], claim: Claim) -> None:
        tried.append(target.target_id)
        if target.target_id == "bad":
            raise RuntimeError(f"attempt {claim.attempt}")

    with pytest.raises(SweepFailed, match="1 of 3 targets failed: bad") as raised:
        run(root, targets("good", "bad", "fine"), body, max_attempts=3, keep_going=True, **QUICK)
    assert [str(error) for error in raised.value.exceptions] == ["attempt 3"]
    assert tried == ["good", "bad", "fine", "bad", "bad"]
    assert states(root) == {"good": ("SUCCESS", 1), "bad": ("FAILED", 3), "fine": ("SUCCESS", 1)}


def test_without_a_limit_each_worker_tries_a_failing_target_once(root: str) -> None:
    def body(target: SweepTarget[int], claim: Claim) -> None:
        raise RuntimeError(f"attempt {claim.attempt}")

    for attempt in (1, 2):
        with pytest.raises(SweepFailed) as raised:
            claim_and_run(root, targets("bad"), body, keep_going=True, **QUICK)
        assert [str(error) for error in raised.value.exceptions] == [f"attempt {attempt}"]


def test_a_target_that_comes_right_is_a_success_for_all(root: str) -> None:
    def body(target: SweepTarget[int], claim: Claim) -> None:
        if claim.attempt == 1:
            raise RuntimeError("not yet")

    claim_and_run(root, targets("late"), body, max_attempts=2, keep_going=True, **QUICK)
    (found,) = sweep_status(root)
    assert (found.state, found.attempts, found.token, found.error) == ("SUCCESS", 2, 2, None)


def test_what_failed_before_can_be_left_alone(root: str) -> None:
    with pytest.raises(ZeroDivisionError), step_lock(f"{root}/bad"):
        raise ZeroDivisionError("of another worker")
    with pytest.raises(SweepFailed) as raised:
        claim_and_run(root, targets("bad", "good"), lambda target, claim: None, force_run_failed=False)
    (error,) = raised.value.exceptions
    assert isinstance(error, PreviousTaskFailed)
    assert "ZeroDivisionError: of another worker" in str(error)
    assert states(root)["good"] == ("SUCCESS", 1)


@pytest.mark.slow
def test_what_a_peer_holds_is_passed_over_and_waited_for(root: str) -> None:
    order: list[str] = []
    released = threading.Event()

    def hold() -> None:
        with step_lock(f"{root}/held", **QUICK):
            holding.set()
            released.wait(DEADLINE_SECONDS)
            order.append("held")

    def body(target: SweepTarget[int], claim: Claim) -> None:
        order.append(target.target_id)
        released.set()

    holding = threading.Event()
    peer = threading.Thread(target=hold)
    peer.start()
    assert holding.wait(DEADLINE_SECONDS)
    claim_and_run(root, targets("held", "free"), body, **QUICK)
    peer.join()
    assert order == ["free", "held"]


@both_forms
def test_a_known_id_with_another_config_is_an_error(root: str, run: Callable[..., None]) -> None:
    """A target that is skipped as done would be taken for one that was run."""
    ran: list[Any] = []

    def body(target: SweepTarget[Any]) -> None:
        ran.append(target.config)

    run(root, [SweepTarget("a", {"lr": 0.1, "seed": 1}), SweepTarget("b", object())], body)
    run(root, [SweepTarget("a", {"seed": 1, "lr": 0.1}), SweepTarget("b", object())], body)
    assert len(ran) == 2
    with pytest.raises(SweepFailed, match=r"1 of 2 .*: a") as raised:
        run(root, [SweepTarget("a", {"lr": 0.2, "seed": 1}), SweepTarget("c", 1)], body)
    assert "another configuration" in str(raised.value.exceptions[0])
    assert ran[2:] == [1]
    run(root, [SweepTarget("d", object(), identity=[1])], body)
    with pytest.raises(SweepFailed):
        run(root, [SweepTarget("d", object(), identity=[2])], body)


def test_a_damaged_record_fails_its_target_alone_and_is_left_as_it_is(root: str) -> None:
    store = open_store(root)
    store.write("damaged", b'{"half": ', None)
    with pytest.raises(SweepFailed, match=r"1 of 2 .*: damaged") as raised:
        claim_and_run(root, targets("damaged", "good"), lambda target, claim: None)
    assert "move it away to run its target afresh" in str(raised.value.exceptions[0])
    assert states(root) == {"damaged": ("UNREADABLE", 0), "good": ("SUCCESS", 1)}
    stored = store.read("damaged")
    assert stored is not None
    assert stored.data == b'{"half": '


@both_forms
def test_a_result_that_does_not_count_is_told(
    root: str, run: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []

    def body(target: SweepTarget[int], claim: Claim) -> None:
        runs.append(claim.token)
        if len(runs) == 1:
            open_store(root).discard("a")

    run(root, targets("a"), body, **QUICK)
    assert runs == [1, 1]
    assert "a: its record was deleted" in caplog.text


def test_ctrl_c_in_a_body_gives_its_claim_back(root: str) -> None:
    def body(target: SweepTarget[int], claim: Claim) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        claim_and_run(root, targets("a", "b"), body)
    assert states(root) == {"a": ("INTERRUPTED", 0)}


def test_ctrl_c_that_reaches_a_handler_of_the_body_gives_its_claim_back(root: str) -> None:
    """The worker does not see the signal, so it believes the exception."""
    before = signal.getsignal(signal.SIGINT)

    def body(target: SweepTarget[int], claim: Claim) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            claim_and_run(root, targets("a", "b"), body)
    finally:
        signal.signal(signal.SIGINT, before)
    assert states(root) == {"a": ("INTERRUPTED", 0)}


class Outcome(BaseException):
    """As test frameworks and schedulers have them: no `Exception`."""


@both_forms
@pytest.mark.parametrize("kind", ["function", "coroutine"])
@pytest.mark.parametrize(
    "end",
    [
        SystemExit(1),
        SystemExit(0),
        Outcome("of its own"),
        KeyboardInterrupt("mine"),
        asyncio.CancelledError("mine"),
        GeneratorExit("mine"),
    ],
    ids=repr,
)
def test_a_body_that_exits_unasked_has_failed_and_its_worker_goes_on(
    root: str, run: Callable[..., None], kind: str, end: BaseException
) -> None:
    def function(target: SweepTarget[int], claim: Claim) -> None:
        if target.target_id == "bad":
            raise end

    async def coroutine(target: SweepTarget[int], claim: Claim) -> None:
        function(target, claim)

    body = function if kind == "function" else coroutine
    with pytest.raises(SweepFailed, match="1 of 2 targets failed: bad") as raised:
        run(root, targets("bad", "good"), body, max_attempts=2, keep_going=True, **QUICK)
    (error,) = raised.value.exceptions
    assert isinstance(error, BodyExited)
    assert error.__cause__ is end
    assert states(root) == {"bad": ("FAILED", 2), "good": ("SUCCESS", 1)}
    recorded = next(found.error for found in sweep_status(root) if found.target_id == "bad")
    assert recorded is not None
    assert f"{type(end).__name__}: {end}" in recorded


def test_a_coroutine_that_is_closed_has_not_raised(root: str) -> None:
    """As when a loop that nobody runs any more is collected: `close` raises what the coroutine makes of its end."""
    bodies: list[asyncio.Task[Any]] = []

    async def body(target: SweepTarget[int]) -> None:
        task = asyncio.current_task()
        assert task is not None
        bodies.append(task)
        loop.stop()
        await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    work = loop.create_task(claim_and_run_async(root, targets("a"), body))
    loop.run_forever()
    coroutine: Any = bodies[0].get_coro()
    coroutine.close()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(work)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@both_forms
@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_body_ended_by_the_programs_own_handler_of_a_signal_gives_its_claim_back(
    root: str, run: Callable[..., None], kind: str
) -> None:
    """The exception that the handler raises is one that the worker was asked for, whatever its code."""

    left: list[int] = []

    def leave(number: int, frame: object) -> None:
        left.append(number)
        if len(left) == 1:
            sys.exit(1)

    def function(target: SweepTarget[int], claim: Claim) -> None:
        # Where this runs in a thread, the handler does not; and a loop that just begins to wait does not see the first signal.
        for _ in range(int(DEADLINE_SECONDS / 0.1)):
            os.kill(os.getpid(), signal.SIGTERM)
            if claim.stop.wait(0.1):
                return

    async def coroutine(target: SweepTarget[int], claim: Claim) -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit) as raised:
            run(root, targets("a", "b"), function if kind == "function" else coroutine, max_attempts=2, **QUICK)
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 1
    assert states(root) == {"a": ("INTERRUPTED", 0)}


@both_forms
def test_a_body_may_take_the_target_alone(root: str, run: Callable[..., None]) -> None:
    seen: list[Any] = []

    def alone(target: SweepTarget[int]) -> None:
        seen.append(target.config)

    async def coroutine(target: SweepTarget[int]) -> None:
        seen.append(target.config)

    def with_option(target: SweepTarget[int], verbose: bool = False) -> None:
        seen.append((target.config, verbose))

    def with_claim(target: SweepTarget[int], claim: Claim | None = None) -> None:
        seen.append(claim and claim.target_id)

    def anything(*arguments: Any) -> None:
        seen.append(len(arguments))

    for name, body in enumerate(
        (alone, coroutine, with_option, with_claim, anything, partial(with_option, verbose=True))
    ):
        run(root, targets(f"t{name}"), body)
    assert seen == [0, 0, (0, False), "t3", 2, (0, True)]


@both_forms
def test_a_body_that_cannot_be_called_is_refused_before_anything_is_claimed(
    root: str, run: Callable[..., None]
) -> None:
    with pytest.raises(TypeError, match="takes 3 arguments; expected body\\(target\\) or body\\(target, claim\\)"):
        run(root, targets("a"), lambda target, claim, more: None)
    with pytest.raises(TypeError, match="takes 0 arguments"):
        run(root, targets("a"), lambda: None)
    assert sweep_status(root) == []


def test_the_package_exports_what_a_program_needs() -> None:
    assert (sweep.SweepTarget, sweep.claim_and_run, sweep.step_lock, sweep.sweep_status) == (
        SweepTarget,
        claim_and_run,
        step_lock,
        sweep_status,
    )


def test_a_coroutine_in_disguise_is_not_taken_for_a_success(root: str) -> None:
    async def never_run() -> None: ...

    made: list[Awaitable[None]] = []

    def body(target: SweepTarget[int], claim: Claim) -> Awaitable[None]:
        made.append(never_run())
        return made[-1]

    with pytest.raises(SweepFailed) as raised:
        claim_and_run(root, targets("a"), body, keep_going=True, **QUICK)
    assert "pass a coroutine function" in str(raised.value.exceptions[0])
    for coroutine in made:
        coroutine.close()  # type: ignore[attr-defined]
    assert states(root) == {"a": ("FAILED", 1)}


@pytest.mark.parametrize(
    ("given", "keywords", "message"),
    [
        (["a", "b", "a"], {}, "targets given more than once: a"),
        (["a"], {"lease": 30.0}, "it must be at least twice the heartbeat"),
        (["a"], {"max_attempts": 0}, "max_attempts is 0"),
    ],
)
def test_bad_calls_are_refused_before_anything_is_written(
    root: str, given: list[str], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        claim_and_run(root, targets(*given), lambda target, claim: None, **{"heartbeat": 20.0, **keywords})
    assert sweep_status(root) == []


def test_a_claim_costs_three_requests_and_a_root_is_proven_once_a_process(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(MemoryStore, name)

        def request(store: MemoryStore, *arguments: Any) -> Any:
            requests.append(" ".join([name, *arguments[:1]]))
            return real(store, *arguments)

        return request

    for name in ("read", "write", "keys", "discard"):
        monkeypatch.setattr(MemoryStore, name, counted(name))
    claim_and_run(root, targets("a"), lambda target, claim: None)
    assert [request for request in requests if ".probe" not in request] == ["read a", "write a", "write a"]
    assert len(requests) == 3 + 6
    requests.clear()
    claim_and_run(root, targets("b"), lambda target, claim: None)
    asyncio.run(claim_and_run_async(root, targets("c"), lambda target, claim: None))
    with step_lock(f"{root}/d"):
        pass
    assert requests == [f"{what} {key}" for key in "bcd" for what in ("read", "write", "write")]


def test_no_targets_are_no_work(root: str) -> None:
    claim_and_run(root, [], lambda target, claim: None)


@pytest.mark.slow
def test_a_storage_out_of_reach_ends_a_worker_after_ten_leases(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = itertools.count()
    real_read = MemoryStore.read

    def read(store: MemoryStore, key: str) -> Any:
        if key == "a":
            next(reads)
            raise StoreError("injected: out of reach")
        return real_read(store, key)

    monkeypatch.setattr(MemoryStore, "read", read)
    with pytest.raises(StoreError, match="out of reach"):
        claim_and_run(root, targets("a"), lambda target, claim: None, heartbeat=0.05, lease=0.2)
    assert next(reads) >= 2, "it gave up at once"


# --- coroutines ---


class Cut:
    """A store whose writes fail from a moment on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = False
        real_write = MemoryStore.write

        def write(store: MemoryStore, key: str, data: bytes, version: str | None) -> str:
            if self.now and not key.startswith(".probe"):
                raise StoreError("injected: cut off")
            return real_write(store, key, data, version)

        monkeypatch.setattr(MemoryStore, "write", write)


@pytest.mark.slow
async def test_a_lost_lease_cancels_the_coroutine_and_the_target_is_run_again(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, ends = Cut(monkeypatch), []

    async def body(target: SweepTarget[int], claim: Claim) -> None:
        if claim.token == 1:
            cut.now = True
            try:
                await asyncio.sleep(DEADLINE_SECONDS)
            except asyncio.CancelledError:
                cut.now = False
                ends.append("cancelled")
                raise
        ends.append(f"token {claim.token}")

    await claim_and_run_async(root, targets("a"), body, heartbeat=0.1, lease=2.0)
    assert ends == ["cancelled", "token 2"]
    assert states(root) == {"a": ("SUCCESS", 2)}


@pytest.mark.slow
async def test_a_lost_lease_tells_the_function_and_what_it_returns_does_not_count(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, ends = Cut(monkeypatch), []

    def body(target: SweepTarget[int], claim: Claim) -> None:
        if claim.token == 1:
            cut.now = True
            assert claim.stop.wait(DEADLINE_SECONDS)
            cut.now = False
        ends.append(claim.token)

    await claim_and_run_async(root, targets("a"), body, heartbeat=0.1, lease=2.0)
    assert ends == [1, 2]


@pytest.mark.parametrize("kind", ["function", "coroutine"])
async def test_cancelling_waits_for_the_body_and_gives_the_claim_back(root: str, kind: str) -> None:
    started, ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def function(target: SweepTarget[int], claim: Claim) -> None:
        loop.call_soon_threadsafe(started.set)
        assert claim.stop.wait(DEADLINE_SECONDS)
        ended.set()

    async def coroutine(target: SweepTarget[int], claim: Claim) -> None:
        started.set()
        try:
            await asyncio.sleep(DEADLINE_SECONDS)
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    task = asyncio.create_task(
        claim_and_run_async(root, targets("a", "b"), function if kind == "function" else coroutine)
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert states(root) == {"a": ("INTERRUPTED", 0)}


async def test_cancelling_ends_the_worker_whatever_the_body_makes_of_it(root: str) -> None:
    started = asyncio.Event()

    async def body(target: SweepTarget[int], claim: Claim) -> None:
        started.set()
        try:
            await asyncio.sleep(DEADLINE_SECONDS)
        except asyncio.CancelledError as error:
            raise RuntimeError("of its cleaning up") from error

    task = asyncio.create_task(claim_and_run_async(root, targets("a", "b"), body))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert states(root) == {"a": ("FAILED", 1)}


async def test_a_function_is_not_begun_once_its_worker_is_cancelled(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, began = asyncio.get_running_loop(), []
    real_write = MemoryStore.write

    def write(store: MemoryStore, key: str, data: bytes, version: str | None) -> str:
        written = real_write(store, key, data, version)
        if key == "a" and version is None:
            loop.call_soon_threadsafe(task.cancel)  # while it is being claimed
        return written

    monkeypatch.setattr(MemoryStore, "write", write)
    task = asyncio.create_task(
        claim_and_run_async(root, targets("a"), lambda target, claim: began.append(target.target_id))
    )
    with pytest.raises(asyncio.CancelledError):
        await task
    assert began == []
    assert states(root) == {"a": ("INTERRUPTED", 0)}


async def test_cancelling_at_any_moment_leaves_no_claim_behind(root: str) -> None:
    """Also between the claim and its body, and while its end is being written."""

    async def body(target: SweepTarget[int], claim: Claim) -> None:
        await asyncio.sleep(0)

    for turns in range(60):
        task = asyncio.create_task(claim_and_run_async(root, targets(f"t{turns}", f"u{turns}"), body))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert {found.state for found in sweep_status(root)} <= {"SUCCESS", "INTERRUPTED"}


async def test_a_worker_that_is_cancelled_just_before_its_body_begins_makes_no_coroutine(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody awaits is a warning of Python's, and so an error here."""

    async def body(target: SweepTarget[int], claim: Claim) -> None:
        pytest.fail("it has begun")

    task = asyncio.create_task(claim_and_run_async(root, targets("a"), body))
    monkeypatch.setattr(LeaseHolder, "on_lost", lambda holder, call: task.cancel())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert states(root) == {"a": ("INTERRUPTED", 0)}


async def test_a_timeout_around_it_is_one(root: str) -> None:
    async def body(target: SweepTarget[int], claim: Claim) -> None:
        limit.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(DEADLINE_SECONDS)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(DEADLINE_SECONDS) as limit:
            await claim_and_run_async(root, targets("a"), body)
    assert states(root) == {"a": ("INTERRUPTED", 0)}


@dataclass
class Optimizer:
    lr: float = 0.1


@both_forms
def test_what_failed_is_picked_up_with_the_configuration_that_it_has_now(root: str, run: Callable[..., None]) -> None:
    """As after a mistake in the configuration was mended; so is what a worker left or gave back."""
    ran: list[Any] = []

    def body(target: SweepTarget[Any]) -> None:
        ran.append(target.config)
        if target.config == {"lr": "high"}:
            raise ValueError("no number")

    with pytest.raises(ValueError, match="no number"):
        run(root, [SweepTarget("a", {"lr": "high"})], body, **QUICK)
    claim = perform(open_store(root), Observer(Terms(0.01, 0.02), REAL_CLOCKS).acquire("b", identity=Identity("old")))
    assert isinstance(claim, OwnedLease), "a claim that its worker left"
    run(root, [SweepTarget("a", {"lr": 0.1}), SweepTarget("b", {"lr": 0.2})], body, heartbeat=0.01, lease=30.0)
    assert ran[1:] == [{"lr": 0.1}, {"lr": 0.2}]
    assert states(root) == {"a": ("SUCCESS", 2), "b": ("SUCCESS", 2)}


def dataclass_of(fields: dict[str, Any], **values: Any) -> Any:
    """An instance of a class `Config` with these fields and their defaults."""
    kinds = [
        (name, Any, field(default_factory=default) if callable(default) else default)
        for name, default in fields.items()
    ]
    return make_dataclass("Config", kinds)(**values)


def named_tuple_of(*names: str, **values: Any) -> Any:
    """An instance of a named tuple `Config`, of which every field has the default 0."""
    return namedtuple("Config", names, defaults=[0] * len(names))(**values)


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        (dataclass_of({"lr": 0.1}), dataclass_of({"lr": 0.1, "wd": 0.0}), True),
        (dataclass_of({"lr": 0.1}, lr=0.3), dataclass_of({"wd": 0.0, "lr": 0.1}, lr=0.3), True),
        (dataclass_of({"lr": 0.1}), dataclass_of({"lr": 0.1, "tags": list, "inner": Optimizer}), True),
        ({"list": [dataclass_of({"lr": 1})]}, {"list": [dataclass_of({"lr": 1, "wd": None})]}, True),
        (named_tuple_of("lr"), named_tuple_of("lr", "wd"), True),
        (named_tuple_of("lr"), named_tuple_of("lr", "wd", wd=1), False),
        (named_tuple_of("lr", "wd"), named_tuple_of("lr"), False),
        ([named_tuple_of("lr")], [named_tuple_of("wd", "lr")], True),
        (dataclass_of({"lr": 0.1}), dataclass_of({"lr": 0.1, "wd": 0.0}, wd=0.1), False),
        (dataclass_of({"lr": 0.1}), dataclass_of({"lr": 0.1, "wd": 0.0}, lr=0.2), False),
        (dataclass_of({"lr": 0.1}), dataclass_of({"lr": 0.2}), False),
        (dataclass_of({"lr": 0.1, "wd": 0.0}), dataclass_of({"lr": 0.1}), False),
        (dataclass_of({"flag": 1}), dataclass_of({"flag": 1, "wd": True}, wd=1), False),
    ],
)  # fmt: skip
def test_a_new_field_with_its_default_is_no_other_configuration(
    root: str, before: Any, now: Any, is_same: bool
) -> None:
    claim_and_run(root, [SweepTarget("a", before)], lambda target: None)
    ran: list[str] = []
    with contextlib.nullcontext() if is_same else pytest.raises(SweepFailed, match="a"):
        claim_and_run(root, [SweepTarget("a", now)], lambda target: ran.append(target.target_id))
    assert ran == []


def test_a_class_that_does_not_let_its_fields_be_read_is_not_compared() -> None:
    @dataclass
    class Unset:
        step: int = field(init=False)

    assert Identity({"a": Unset()}).digest is None

    @dataclass
    class Machine:
        name: str = field(default_factory=lambda: str(int("none")))

    assert not Identity(Machine("a")).is_that_of("873d51bb7e9047523088ded3f644dd77", "Machine()")


def test_the_digests_of_earlier_releases_records_hold() -> None:
    """These have no names of fields."""
    identity = Identity({"a": Optimizer()})
    assert identity.digest == "873d51bb7e9047523088ded3f644dd76"
    assert identity.is_that_of(identity.digest, None)
    assert not identity.is_that_of("873d51bb7e9047523088ded3f644dd77", None)


@both_forms
def test_an_output_directory_that_was_deleted_is_told(
    tmp_path: Path, run: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, targets("a", "b"), lambda target: None)
    assert caplog.text == ""
    (tmp_path / "a").rmdir()
    run(tmp_path, targets("a", "b"), lambda target: pytest.fail("it ran again"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{tmp_path / 'a'}, is not there any more" in caplog.text
    first, second = sweep_status(tmp_path)
    assert (first.state, second.error) == ("SUCCESS", None)
    assert "is not there any more" in str(first.error)
    with pytest.raises(StepAlreadyDone, match="is not there any more"), step_lock(tmp_path / "a"):
        pytest.fail("it is done")
    (tmp_path / "a.json").unlink()
    caplog.clear()
    run(tmp_path, targets("a"), lambda target, claim: Path(claim.output_path).rmdir())
    assert "is not there any more" in caplog.text


@both_forms
@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        iter,
        deque,
        lambda given: {t.target_id: t for t in given}.values(),
        dict.fromkeys,
    ],
)
def test_targets_may_be_any_iterable(root: str, run: Callable[..., None], kind: Callable[..., Any]) -> None:
    ran: list[str] = []
    run(root, kind(targets("a", "b", "c")), lambda target: ran.append(target.target_id))
    assert sorted(ran) == ["a", "b", "c"]
    run(root, (target for target in targets("a", "d")), lambda target: ran.append(target.target_id))
    assert sorted(ran) == ["a", "b", "c", "d"]
    run(root, {SweepTarget("e", 1), SweepTarget("f", 2)}, lambda target: ran.append(target.target_id))
    assert sorted(ran) == ["a", "b", "c", "d", "e", "f"]
    run(root, iter(()), lambda target: None)


@both_forms
@pytest.mark.parametrize("given", [["a"], {"a": 1}, "a", SweepTarget("a", 0), 5, None])
def test_what_is_no_target_is_refused(root: str, run: Callable[..., None], given: Any) -> None:
    with pytest.raises(TypeError, match="SweepTarget"):
        run(root, given, lambda target: None)
    assert sweep_status(root) == []
