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

from counterpoint.cluster import devices
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
  --query-compute-apps=*) printf '{pid}, 512\\n{pid}, 256\\n77777777, 1\\n[N/A], [N/A]\\n' ;;
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


def give_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    nvidia = tmp_path / "bin" / "nvidia-smi"
    nvidia.parent.mkdir()
    nvidia.write_text(script)
    nvidia.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvidia.parent}:{os.environ['PATH']}")


@pytest.mark.slow
def test_a_worker_counts_with_its_descendants(
    tmp_path: Path, file: Callable[..., UsageFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    with busy_worker() as (worker, child):
        give_nvidia_smi(tmp_path, monkeypatch, NVIDIA.replace("{pid}", str(child)))
        usage = file()

        def measured() -> dict[str, Any]:
            usage.measure({"trainer": worker.pid or 0})
            lines = usage.path.read_text().splitlines() if usage.path.exists() else []
            return json.loads(lines[-1]) if lines else {}

        wait_until(lambda: measured().get("workers", {}).get("trainer", {}).get("cpu", 0) > 0, "CPU time of the child")
        wait_until(lambda: measured()["workers"]["trainer"]["memory"] > 64 * 2**20, "its memory")
        line = measured()
        assert [*line["workers"]] == ["trainer"]
        assert (line["workers"]["trainer"]["gpu_memory"], line["gpus"]) == (768 * 2**20, {"0": 0.93})


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
        local.measure({"trainer": os.getpid()})
    lines = local.path.read_bytes().splitlines()
    assert local.path.stat().st_size <= 600
    assert len(lines) > 1
    assert all(json.loads(line)["workers"]["trainer"]["memory"] > 0 for line in lines)


FAILED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure it is installed, and running."


@pytest.mark.parametrize("said", ["No devices were found", FAILED, "0", "1, 2, 3"])
def test_what_nvidia_smi_says_instead_of_figures_keeps_nothing_else_from_being_measured(
    tmp_path: Path, file: Callable[..., UsageFile], monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    give_nvidia_smi(tmp_path, monkeypatch, f'#!/bin/sh\necho "{said}"\nexit 6\n')
    usage = file()
    for _ in range(2):
        usage.measure({"trainer": os.getpid()})
    (line,) = map(json.loads, usage.path.read_text().splitlines())
    assert (line["gpus"], [*line["workers"]["trainer"]]) == ({}, ["cpu", "memory"])


def test_a_command_that_hangs_holds_up_nobody_and_is_not_begun_twice(
    tmp_path: Path, file: Callable[..., UsageFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on = tmp_path / "began", tmp_path / "goes_on"
    script = f"#!/bin/sh\nprintf . >> {began}\nwhile [ ! -e {goes_on} ]; do sleep 0.02; done\n"
    give_nvidia_smi(tmp_path, monkeypatch, script)
    monkeypatch.setattr(devices, "NVIDIA_SECONDS", 300.0)
    usage = file()
    own = [WorkerView("trainer", State.READY, 0.0, os.getpid(), "")]
    usage.measure({"trainer": os.getpid()})
    usage.write(State.RUNNING, own)  # returns although the command waits
    wait_until(began.exists, "the command")
    usage.write(State.RUNNING, own)
    assert began.read_text() == "."
    assert not usage.path.exists()
    goes_on.touch()
    wait_until(usage.path.exists, "the line")


def test_a_line_that_cannot_be_written_is_said_at_the_next_look(tmp_path: Path, file: Callable[..., UsageFile]) -> None:
    usage = file()
    usage.path.mkdir()
    own = [WorkerView("trainer", State.READY, 0.0, os.getpid(), "")]

    def is_said() -> bool:
        try:
            usage.write(State.RUNNING, own)
        except IsADirectoryError:
            return True
        return False

    wait_until(is_said, "the error")


def test_ids_that_were_used_anew_during_a_look_end_it_all_the_same(
    file: Callable[..., UsageFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    each_others = {pid: usage_file._Process(parent, 1, 0, 1) for pid, parent in ((7, 8), (8, 7))}
    monkeypatch.setattr(usage_file, "_processes", lambda: each_others)
    usage = file()
    for _ in range(2):
        usage.measure({"trainer": 7})
    assert json.loads(usage.path.read_text())["workers"]["trainer"]["memory"] == 2 * os.sysconf("SC_PAGE_SIZE")
