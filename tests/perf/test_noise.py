"""What others take of the machine is told from what is our own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from perf.noise import CpuTimes, measured_noise


@pytest.mark.parametrize(
    ("after", "share"),
    [
        (CpuTimes(total=20.0, busy=8.0, ours=4.0), 0.0),
        (CpuTimes(total=20.0, busy=9.0, ours=4.0), 0.1),
        (CpuTimes(total=20.0, busy=14.0, ours=4.0), 0.6),
        (CpuTimes(total=20.0, busy=5.0, ours=4.0), 0.0),  # the counts are taken one after the other
        (CpuTimes(total=10.0, busy=4.0, ours=0.0), 0.0),
    ],
)
def test_others_are_all_that_is_busy_and_not_ours(after: CpuTimes, share: float) -> None:
    assert after.share_of_others(CpuTimes(total=10.0, busy=4.0, ours=0.0)) == pytest.approx(share)


def test_others_that_keep_the_machine_busy_are_seen() -> None:
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with measured_noise() as noise:
            deadline = time.monotonic() + 30
            before = CpuTimes.now()
            while CpuTimes.now().busy < before.busy + 0.1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    assert noise.share > 0.3
