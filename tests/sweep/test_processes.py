"""Workers as real processes on a local disk: each target runs exactly once, whatever their number."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from perf.sweep_worker import Witness, targets, work
from sweep.status import sweep_status

DEADLINE_SECONDS = 60.0


def start(count: int, *arguments: object) -> list[ForkServerProcess]:
    """Processes that run `work` with the same arguments. They do not share memory with us, or an open store."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=work, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "count"), [(1, 5), (2, 5), (3, 3), (5, 2), (16, 200)])
def test_each_target_runs_exactly_once(tmp_path: Path, workers: int, count: int) -> None:
    root, witness = tmp_path / "sweep", tmp_path / "witness"
    witness.mkdir()
    processes = start(workers, str(root), witness, count, 0.01, 0.2, 20.0)
    for process in processes:
        process.join(DEADLINE_SECONDS)
    assert [process.exitcode for process in processes] == [0] * workers
    seen = Witness(witness).testimony()
    assert Counter(target_id for target_id, _ in seen.events["end"]) == Counter(t.target_id for t in targets(count))
    assert seen.events.keys() == {"begin", "end"}
    statuses = sweep_status(root)
    assert [(status.target_id, status.state, status.token) for status in statuses] == [
        (target.target_id, "SUCCESS", 1) for target in targets(count)
    ]
