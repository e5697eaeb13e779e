"""What a supervisor measures of a job's processes: that of a worker is that of its descendants, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.serving import usage_file
from counterpoint.job.serving.usage_file import USAGE_FILE, UsageFile
from tests.support.polling import wait_until

BUSY = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'x = bytearray(64 * 2**20)\\nwhile True: pass']);"
    "print(child.pid, flush=True); child.wait()"
)
NVIDIA = """#!/bin/sh
case "$1" in
  --query-compute-apps=*) printf '{pid}, 512\\n77777777, 1\\n[N/A], [N/A]\\n' ;;
  *) printf '0, 93\\n' ;;
esac
"""


@contextmanager
def busy_worker() -> Iterator[tuple[WorkerView, int]]:
    """A worker that sleeps, and its child, which does not."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None
    try:
        child = int(process.stdout.readline())
        yield WorkerView("trainer", State.READY, 0.0, process.pid, ""), child
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., UsageFile]:
    monkeypatch.setattr(usage_file, "EVERY_SECONDS", 0.0)
    return lambda backend="local": UsageFile(tmp_path, backend)


@pytest.mark.slow
def test_a_worker_counts_with_its_descendants(
    tmp_path: Path, file: Callable[..., UsageFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    with busy_worker() as (worker, child):
        nvidia = tmp_path / "bin" / "nvidia-smi"
        nvidia.parent.mkdir()
        nvidia.write_text(NVIDIA.replace("{pid}", str(child)))
        nvidia.chmod(0o755)
        monkeypatch.setenv("PATH", f"{nvidia.parent}:{os.environ['PATH']}")
        usage = file()

        def measured() -> dict[str, Any]:
            usage.write(State.RUNNING, [worker, WorkerView("gone", State.STOPPED, 0.0, None, "")])
            lines = usage.path.read_text().splitlines() if usage.path.exists() else []
            return json.loads(lines[-1]) if lines else {}

        wait_until(lambda: measured().get("workers", {}).get("trainer", {}).get("cpu", 0) > 0, "CPU time of the child")
        wait_until(lambda: measured()["workers"]["trainer"]["memory"] > 64 * 2**20, "its memory")
        line = measured()
        assert [*line["workers"]] == ["trainer"]
        assert (line["workers"]["trainer"]["gpu_memory"], line["gpus"]) == (512 * 2**20, {"0": 0.93})


def test_workers_of_other_machines_are_not_measured_and_the_file_is_bounded(
    tmp_path: Path, file: Callable[..., UsageFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [WorkerView("trainer", State.READY, 0.0, os.getpid(), "")]
    remote, local = file("ray"), file()
    for _ in range(3):
        remote.write(State.RUNNING, own)
        local.write(State.RUNNING, [])
    assert not (tmp_path / USAGE_FILE).exists()
    monkeypatch.setattr(usage_file, "MOST_BYTES", 600)
    for _ in range(30):
        local.write(State.RUNNING, own)
    lines = local.path.read_bytes().splitlines()
    assert local.path.stat().st_size <= 600
    assert len(lines) > 1
    assert all(json.loads(line)["workers"]["trainer"]["memory"] > 0 for line in lines)
