"""A claim held for real: threads, clocks, forks, and a storage that hangs or fails."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from counterpoint.sweep.claim import SweepTarget, claim_and_run, claim_and_run_async
from counterpoint.sweep.interruption import Interruptions
from counterpoint.sweep.lease import Terms, monotonic
from counterpoint.sweep.lock import (
    REAL_CLOCKS,
    LeaseHolder,
    PreviousTaskFailed,
    StepAlreadyDone,
    StepHeld,
    holding,
    step_lock,
)
from counterpoint.sweep.protocol import LeaseLost, Observer, OwnedLease, perform
from counterpoint.sweep.record import Record
from counterpoint.sweep.status import TargetStatus, sweep_status
from counterpoint.sweep.store import Stored, StoreError
from counterpoint.sweep.stores.memory import MemoryStore
from tests.support.polling import wait_until

DEADLINE_SECONDS = 60.0
_numbers = itertools.count()

QUICK = Terms(heartbeat=0.05, lease=0.6)
PATIENT = Terms(heartbeat=0.05, lease=60.0)


class TroubledStore(MemoryStore):
    """A store in memory that does what a test says before each write."""

    def __init__(self) -> None:
        super().__init__(f"trouble-{next(_numbers)}")
        self.before_write = no_trouble
        self.after_write = no_trouble
        self.writes = 0

    def write(self, key: str, data: bytes, version: str | None) -> str:
        """Counted."""
        self.writes += 1
        self.before_write()
        written = super().write(key, data, version)
        self.after_write()
        return written

    def record(self) -> Record:
        stored = self.read("target")
        assert stored is not None
        return Record.of_bytes(stored.data, "target")


@pytest.fixture
def root() -> str:
    return f"memory://lock-{next(_numbers)}"


def status(root: str) -> TargetStatus:
    (found,) = sweep_status(root)
    return found


def claim(store: MemoryStore, terms: Terms) -> LeaseHolder:
    owned = perform(store, Observer(terms, REAL_CLOCKS).acquire("target"))
    assert isinstance(owned, OwnedLease)
    return LeaseHolder(store, owned)


def no_trouble() -> None:
    """Nothing."""


def fails() -> None:
    raise StoreError("injected: out of order")


# --- step_lock ---


def test_a_step_is_done_once(root: str) -> None:
    with step_lock(f"{root}/step") as held:
        assert (held.token, held.attempt, status(root).state) == (1, 1, "RUNNING")
        with ThreadPoolExecutor(1) as peer:
            held_by = peer.submit(entering(f"{root}/step", timeout=0.0)).exception()
        assert isinstance(held_by, StepHeld)
        assert "RUNNING by process" in str(held_by)
    assert status(root).state == "SUCCESS"
    done = r"/step: SUCCESS by process \d+ on .*, attempt 1, token 1"
    with pytest.raises(StepAlreadyDone, match=done), step_lock(f"{root}/step"):
        pytest.fail("done twice")


def test_a_step_that_exits_unasked_reads_failed(root: str) -> None:
    with pytest.raises(SystemExit), step_lock(f"{root}/step"):
        sys.exit("out of patience")
    found = status(root)
    assert (found.state, found.attempts, found.error) == ("FAILED", 1, "SystemExit: out of patience")


def test_a_step_that_raises_reads_failed_with_the_error(root: str) -> None:
    with pytest.raises(RuntimeError, match="no such luck"), step_lock(f"{root}/step"):
        raise RuntimeError("no such luck")
    found = status(root)
    assert (found.state, found.error) == ("FAILED", "RuntimeError: no such luck")
    assert found.traceback is not None
    assert "test_lock.py" in found.traceback
    with (
        pytest.raises(PreviousTaskFailed, match="RuntimeError: no such luck"),
        step_lock(f"{root}/step", force_run_failed=False),
    ):
        pytest.fail("tried again")


def test_an_exception_that_cannot_be_put_into_words_ends_its_claim_all_the_same(root: str) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise AttributeError("no message was ever set")

    with pytest.raises(Mute), step_lock(f"{root}/step"):
        raise Mute
    assert status(root).state == "FAILED"
    assert "Mute" in str(status(root).error)


def given_up() -> None:
    raise GeneratorExit


def interrupted() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("end", "interruption"), [(interrupted, KeyboardInterrupt), (given_up, GeneratorExit)])
def test_a_step_that_is_interrupted_is_free_at_once(
    root: str, end: Callable[[], None], interruption: type[BaseException]
) -> None:
    with pytest.raises(interruption), step_lock(f"{root}/step"):
        end()
    assert (status(root).state, status(root).attempts) == ("INTERRUPTED", 0)
    with step_lock(f"{root}/step", timeout=0.0) as held:
        assert (held.token, held.attempt) == (2, 1)


def entering(path: str, timeout: float | None = None) -> Callable[[], None]:
    """Takes a step that is held: a test fails if it gets it."""

    def enter() -> None:
        with step_lock(path, heartbeat=0.02, lease=20.0, timeout=timeout):
            pytest.fail("two at once")

    return enter


def test_a_step_in_itself_is_refused_at_once_and_ends_as_any_other(root: str) -> None:
    with step_lock(f"{root}/step"), step_lock(f"{root}/other"):
        for _ in range(2):
            with pytest.raises(StepHeld, match=rf"{root}/step: RUNNING by process {os.getpid()} .*wait for itself"):
                entering(f"{root}/step")()
    with pytest.raises(StepAlreadyDone):
        entering(f"{root}/step")()


@pytest.mark.parametrize("kind", ["function", "function in a loop", "coroutine"])
def test_a_target_in_its_own_body_is_refused_at_once(root: str, kind: str) -> None:
    target = SweepTarget[dict[str, str]]("step", {})

    def function(target: SweepTarget[dict[str, str]]) -> None:
        entering(f"{root}/{target.target_id}")()

    async def coroutine(target: SweepTarget[dict[str, str]]) -> None:
        function(target)

    def run() -> None:
        if kind == "function in a loop":
            asyncio.run(claim_and_run_async(root, [target], function))
        else:
            claim_and_run(root, [target], function if kind == "function" else coroutine)

    with pytest.raises(StepHeld, match="wait for itself"):
        run()


def test_whoever_waits_for_a_step_says_for_whom(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(1) as peer:
        with step_lock(f"{root}/step"):
            waiting = peer.submit(entering(f"{root}/step"))
            wait_until(
                lambda: f"waiting for {root}/step: RUNNING by process {os.getpid()} on" in caplog.text, "its line"
            )
        assert isinstance(waiting.exception(), StepAlreadyDone)
    assert caplog.text.count("waiting for") == 1


def test_threads_of_one_process_are_strangers_to_each_other(root: str) -> None:
    """Each acquisition has an identity of its own: the lock is not re-entrant, whoever asks."""
    inside, most, tally = 0, 0, threading.Lock()

    def enter() -> None:
        nonlocal inside, most
        try:
            with step_lock(f"{root}/step", heartbeat=0.02, lease=20.0, timeout=DEADLINE_SECONDS):
                with tally:
                    inside += 1
                    most = max(most, inside)
                with tally:
                    inside -= 1
        except StepAlreadyDone:
            return

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert status(root).token == 1


def test_the_path_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'\.\.' is not an id"), step_lock(f"{tmp_path}/sweep/.."):
        pytest.fail("entered")
    assert list(tmp_path.iterdir()) == []


# --- heartbeats ---


def test_a_claim_beats_for_as_long_as_it_is_held() -> None:
    store = TroubledStore()
    with holding(claim(store, PATIENT), Interruptions()):
        wait_until(lambda: store.record().revision >= 4, "four heartbeats")
        assert store.record().state == "RUNNING"
    assert store.record().state == "SUCCESS"
    written = store.writes
    wait_until(lambda: not any(thread.name.endswith("target") for thread in threading.enumerate()), "the thread's end")
    assert store.writes == written


@pytest.mark.slow
def test_heartbeats_go_on_through_errors_and_lost_answers() -> None:
    store, errors = TroubledStore(), itertools.count()

    def now_and_then() -> None:
        if next(errors) % 3:
            fails()

    with holding(claim(store, PATIENT), Interruptions()) as held:
        store.before_write = now_and_then
        wait_until(lambda: store.record().revision >= 4, "four heartbeats")
        store.before_write, store.after_write = no_trouble, now_and_then
        wait_until(lambda: store.record().revision >= 8, "four more")
        assert not held.stop.is_set()
    assert store.record().state == "SUCCESS"


@pytest.mark.slow
@pytest.mark.parametrize(("trouble", "error"), [("fails", "injected: out of order"), ("hangs", "none was answered")])
def test_the_body_is_told_when_no_heartbeat_is_confirmed_and_before_a_peer_may_begin(trouble: str, error: str) -> None:
    store, released = TroubledStore(), threading.Event()
    holder_of_lease = claim(store, QUICK)
    claimed_at = monotonic()

    def hangs() -> None:
        released.wait(DEADLINE_SECONDS)

    store.before_write = fails if trouble == "fails" else hangs
    reason = rf"no heartbeat was confirmed for 0\.5 s.*; the last error: .*{error}"
    with pytest.raises(LeaseLost, match=reason), holding(holder_of_lease, Interruptions()) as held:
        assert held.stop.wait(DEADLINE_SECONDS)
    assert monotonic() - claimed_at >= QUICK.safe_seconds - QUICK.heartbeat, "told before its time"
    assert store.record().state == "RUNNING"
    store.before_write = no_trouble
    released.set()


def test_a_heartbeat_that_breaks_is_told_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(record: Record, wall_time: float) -> Record:
        raise MemoryError("injected")

    monkeypatch.setattr("counterpoint.sweep.lease.with_heartbeat", broken)
    with (
        pytest.raises(LeaseLost, match=r"the heartbeat failed: MemoryError"),
        holding(claim(TroubledStore(), PATIENT), Interruptions()) as held,
    ):
        assert held.stop.wait(DEADLINE_SECONDS)
    assert "the heartbeat failed" in caplog.text


@pytest.mark.slow
def test_a_zombie_can_neither_end_nor_release_what_its_successor_has() -> None:
    """It has slept through its lease, and knows nothing: every end of its is refused."""
    store = TroubledStore()
    observer = Observer(QUICK, REAL_CLOCKS)
    for end in ("succeed", "fail", "give_back"):
        store.discard("target")
        zombie = claim(store, Terms(heartbeat=25.0, lease=50.0))
        stored = store.read("target")
        assert stored is not None
        # Its lease seen to have run out, by an observer that has watched for as long.
        observer.record_ages.unchanged_seconds("target", stored.version, monotonic() - 50.0)
        owned = perform(store, observer.acquire("target"))
        assert isinstance(owned, OwnedLease)
        perform(store, owned.end(lambda record, wall: record, 1.0))
        before = store.read("target")
        if end == "give_back":
            zombie.give_back()
        else:
            with pytest.raises(LeaseLost, match=r"attempt 1 \(token 1\) was taken over: .*\(token 2\)"):
                zombie.succeed() if end == "succeed" else zombie.fail(RuntimeError("too late"))
        assert store.read("target") == before


def test_a_result_whose_answer_was_lost_is_known_to_be_ours() -> None:
    store = TroubledStore()
    with holding(claim(store, PATIENT), Interruptions()):
        answers = iter([fails])

        def first_is_lost() -> None:
            next(answers, no_trouble)()

        store.after_write = first_is_lost
    assert store.record().state == "SUCCESS"


@pytest.mark.slow
def test_a_result_that_cannot_be_written_does_not_count() -> None:
    store = TroubledStore()
    with (
        pytest.raises(LeaseLost, match="how it ended could not be written"),
        holding(claim(store, Terms(0.5, 2.0)), Interruptions()),
    ):
        store.before_write = fails
    assert store.record().state == "RUNNING"


def test_a_deleted_record_is_a_lost_lease() -> None:
    store = TroubledStore()
    holder_of_lease = claim(store, PATIENT)
    store.discard("target")
    with pytest.raises(LeaseLost, match="its record was deleted"), holding(holder_of_lease, Interruptions()) as held:
        assert held.stop.wait(DEADLINE_SECONDS)
    assert store.read("target") is None


def test_what_the_body_raised_is_told_though_it_does_not_count() -> None:
    store = TroubledStore()
    holder_of_lease = claim(store, PATIENT)
    store.discard("target")
    with pytest.raises(LeaseLost, match=r"deleted; .*RuntimeError: no luck"):
        holder_of_lease.fail(RuntimeError("no luck"))


def test_a_forked_child_leaves_its_parents_claim_alone() -> None:
    """Whatever it does with the copy that it has, also should it leave the block by an exception."""
    store = TroubledStore()
    holder_of_lease = claim(store, Terms(25.0, 50.0))
    version = stored(store).version
    child = os.fork()
    if child == 0:
        holder_of_lease.give_back()
        holder_of_lease.fail(RuntimeError("of the child"))
        os._exit(0 if stored(store).version == version else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    holder_of_lease.succeed()
    assert store.record().state == "SUCCESS"


def stored(store: MemoryStore) -> Stored:
    found = store.read("target")
    assert found is not None
    return found


def test_a_label_names_the_target_for_people(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a"
    with (
        step_lock(str(path), "train tiny") as claim,
        pytest.raises(StepHeld, match=rf"train tiny \({path}\)"),
        step_lock(path, label="train tiny", timeout=0),
    ):
        pytest.fail("it is held")
    assert claim.target_id == "a"
    with pytest.raises(StepAlreadyDone, match="train tiny"), step_lock(path, "train tiny"):
        pytest.fail("it is done")
