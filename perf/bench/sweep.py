"""Measures how fast workers claim targets of no work on a local disk, and how fast the status of many targets is read.

    python -m perf.bench.sweep [--quick | --full]

Each claim is two records, one when it is made and one when it ends, both flushed to the disk. It is compared with as many
processes that only replace as many files of that size, flushed as well.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

from perf.bench.command import Size, show
from perf.chaos.sweep_worker import targets
from perf.figures import Case, Figure
from sweep.claim import claim_and_run
from sweep.lease import Terms, claimed, succeeded
from sweep.record import State
from sweep.status import sweep_status

WORKERS = 8
TARGETS, STATUSES = 1000, 10_000
WRITES_A_CLAIM = 2
START_SECONDS = 120.0

_RECORD = succeeded(claimed(None, "target", "0" * 32, "host", 1, Terms(), 0.0), 1.0)


def measure(size: Size) -> list[Case]:
    """Measures the case `sweep`, in some 10 s, or 5 s when quick."""
    scale = size.pick(10, 1, 1)
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        return [Case("sweep", _claims(Path(directory), TARGETS // scale) + _status(Path(directory), STATUSES // scale))]


def _claims(directory: Path, count: int) -> list[Figure]:
    root, bare = directory / "claims", directory / "bare"
    bare.mkdir()
    began, ended = _span(_replace_files, bare, count)
    bare_seconds = ended - began
    began, _ = _span(_claim_all, root, count)
    found = sweep_status(root)
    done = sum(target.state == State.SUCCESS and target.token == 1 for target in found)
    assert done == count, f"{done} of {count} targets were claimed once and succeeded"
    # Until the last result is written: a worker that looks for others' results rests in between.
    seconds = max(target.finished_at or began for target in found) - began
    return [
        Figure("targets", count, ""),
        Figure("workers", WORKERS, ""),
        Figure("claims, each to its end", count / seconds, "/s", 200.0, "at least"),
        Figure("bare flushed files, two a claim", count / bare_seconds, "/s"),
        Figure("share of the bare rate", bare_seconds / seconds, "", 0.1, "at least"),
    ]


def _span(function: Callable[[Path, int], None], directory: Path, count: int) -> tuple[float, float]:
    """Returns when all processes were ready, and when the last had ended, in seconds since the epoch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    barrier = context.Barrier(WORKERS + 1)
    processes = [context.Process(target=_begin, args=(barrier, function, directory, count)) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    barrier.wait(START_SECONDS)
    began = time.time()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes), "a worker failed"
    return began, time.time()


def _begin(barrier: Barrier, function: Callable[[Path, int], None], directory: Path, count: int) -> None:
    barrier.wait(START_SECONDS)
    function(directory, count)


def _claim_all(root: Path, count: int) -> None:
    claim_and_run(root, targets(count), lambda target, claim: None, heartbeat=1.0, lease=30.0)


def _replace_files(directory: Path, count: int) -> None:
    """Replaces a worker's share of the files."""
    data = _RECORD.to_bytes()
    for index in range(count * WRITES_A_CLAIM // WORKERS):
        partial = directory / f"{os.getpid()}-{index}.partial"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, data)
        os.fsync(descriptor)
        os.close(descriptor)
        partial.replace(directory / f"{os.getpid()}-{index}.json")
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _status(directory: Path, count: int) -> list[Figure]:
    root = directory / "status"
    root.mkdir()
    for target in targets(count):
        data = _RECORD.to_bytes().replace(b'"target"', f'"{target.target_id}"'.encode())
        (root / f"{target.target_id}.json").write_bytes(data)
    began = time.perf_counter()
    found = sweep_status(root)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    read = sum(len((root / f"{target.target_id}.json").read_bytes()) for target in targets(count))
    bare = time.perf_counter() - began
    assert len(found) == count
    return [
        Figure("targets whose status is read", count, ""),
        Figure("status", seconds, "s", 2.0),
        Figure("bare read of the same files", bare, "s"),
        Figure("their size", read / 1e6, "MB"),
        Figure("status over the bare read", seconds / bare, "x", 10.0),
    ]


if __name__ == "__main__":
    show(measure)
