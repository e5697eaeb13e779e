"""Workers as real processes: each target runs exactly once, whatever their number, and whatever signals they get."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from counterpoint.sweep.lock import step_lock
from counterpoint.sweep.status import TargetStatus, sweep_status
from perf.chaos.sweep_worker import Witness, targets, work
from tests.support.polling import DEADLINE_SECONDS, wait_until


def start(count: int, function: Callable[..., None], *arguments: object) -> list[ForkServerProcess]:
    """Processes that run it with the same arguments. They share neither memory nor an open store with us."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["perf.chaos.sweep_worker"])
    processes = [context.Process(target=function, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


def status(root: Path) -> TargetStatus:
    (found,) = sweep_status(root, ["only"])
    return found


@pytest.mark.promise("each target of a sweep runs once")
@pytest.mark.slow
@pytest.mark.parametrize(("workers", "count"), [(1, 5), (2, 5), (3, 3), (5, 2), (16, 200)])
def test_each_target_runs_exactly_once(tmp_path: Path, workers: int, count: int) -> None:
    root, witness = tmp_path / "sweep", tmp_path / "witness"
    witness.mkdir()
    processes = start(workers, work, str(root), witness, count, 0.01, 0.2, 20.0)
    for process in processes:
        process.join(2 * DEADLINE_SECONDS)  # sixteen have two hundred targets to do
    assert [process.exitcode for process in processes] == [0] * workers
    seen = Witness(witness).testimony()
    assert Counter(target_id for target_id, _ in seen.events["end"]) == Counter(t.target_id for t in targets(count))
    assert seen.events.keys() == {"begin", "end"}
    statuses = sweep_status(root)
    assert [(status.target_id, status.state, status.token) for status in statuses] == [
        (target.target_id, "SUCCESS", 1) for target in targets(count)
    ]


# --- signals ---


def signalled(body: str, root: Path, notes: Path) -> subprocess.Popen[bytes]:
    """A worker with one of `tests.sweep.signalled`'s bodies."""
    return subprocess.Popen([sys.executable, "-m", "tests.sweep.signalled", body, str(root), str(notes)])


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["function", "coroutine"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_ends_the_body_and_gives_the_claim_back(
    tmp_path: Path, worker: str, number: signal.Signals, code: int
) -> None:
    root = tmp_path / "sweep"
    process = signalled(worker, root, tmp_path)
    wait_until((tmp_path / "began").exists, "the body's begin")
    process.send_signal(number)
    assert process.wait(DEADLINE_SECONDS) == code
    assert (tmp_path / "cleaned-up").exists()
    assert [(found.target_id, found.state, found.attempts) for found in sweep_status(root)] == [
        ("only", "INTERRUPTED", 0)
    ]
    with step_lock(root / "only", timeout=0.0) as claim:
        assert claim.token == 2


@pytest.mark.slow
def test_a_worker_paused_past_its_lease_is_told_and_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    process = signalled("zombie", root, tmp_path)
    wait_until((tmp_path / "began").exists, "the body's begin")
    process.send_signal(signal.SIGSTOP)
    try:
        with step_lock(root / "only", heartbeat=0.1, lease=20.0, timeout=DEADLINE_SECONDS) as successor:
            assert successor.token == 2
            (tmp_path / "go-on").touch()
            process.send_signal(signal.SIGCONT)
            wait_until((tmp_path / "told").exists, "the body's end")
            assert status(root).owner == successor.owner
    finally:
        process.send_signal(signal.SIGCONT)
    ended = status(root)
    assert process.wait(DEADLINE_SECONDS) == 0, "it looks again, finds the successor's SUCCESS, and is done"
    assert status(root) == ended
    assert (ended.state, ended.owner, ended.token) == ("SUCCESS", successor.owner, 2)
