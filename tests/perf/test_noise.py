"""What others take of the machine is told from what is our own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from perf import noise as noise_module
from perf.noise import CpuTimes, measured_noise, settle
from tests.support.polling import wait_until


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


@pytest.mark.slow
def test_the_work_of_descendants_is_ours_while_they_live_and_after() -> None:
    """That of a child's own child included, as a fork server has them."""
    burn = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"]
    child = f"import subprocess, sys; subprocess.run({burn!r}); print(flush=True); sys.stdin.read()"
    before = CpuTimes.now()
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert CpuTimes.now().ours >= before.ours + 0.45
    assert CpuTimes.now().ours >= before.ours + 0.45


def test_others_that_keep_the_machine_busy_are_seen() -> None:
    """Processes whose parent has ended, so that they are no descendants of this one."""
    spin = [sys.executable, "-c", "import time\nwhile time.process_time() < 60: pass"]
    launch = f"import subprocess; p = subprocess.Popen({spin!r}, stdout=subprocess.DEVNULL); print(p.pid, flush=True)"
    pids: list[int] = []
    try:
        while len(pids) < (os.cpu_count() or 1):
            pids.append(int(subprocess.check_output([sys.executable, "-c", launch])))
        with measured_noise() as noise:
            before = CpuTimes.now()
            wait_until(lambda: CpuTimes.now().busy >= before.busy + 0.2, "a busy machine")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert noise.share > 0.3


def test_a_machine_that_is_always_late_is_waited_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + lateness(now)

    monkeypatch.setattr(noise_module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    lateness: Callable[[float], float] = lambda at: 0.02  # noqa: E731
    assert not settle(5.0)
    assert 5.0 <= now < 6.1
    now, lateness = 0.0, lambda at: 0.02 if at < 2.5 else 0.0001
    assert settle(5.0)
    assert 3.5 <= now < 5.0
