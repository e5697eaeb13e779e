"""What dead actors of a job left on a node is found by its mark; what a living one has is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from counterpoint.cluster.remains import MARK, clear_dead, start_of

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@contextmanager
def sleeping(mark: str = "") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP, env=os.environ | ({MARK: mark} if mark else {}))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_only_what_is_of_a_dead_or_condemned_actor_of_the_job_is_killed() -> None:
    job = f"job-{os.getpid()}"
    with sleeping() as dead, sleeping() as living, sleeping() as condemned:
        dead.kill()
        dead.wait()
        marks = {
            "dead": f"{job}/b/dead/1:{dead.pid}:1",
            "living": f"{job}/b/living/1:{living.pid}:{start_of(living.pid)}",
            "condemned": f"{job}/b/condemned/1:{condemned.pid}:{start_of(condemned.pid)}",
            "another's": f"{job}x/b/dead/1:{dead.pid}:1",
            "malformed": f"{job}/b/dead:x",
        }
        with (
            sleeping(marks["dead"]) as of_dead,
            sleeping(marks["living"]) as of_living,
            sleeping(marks["condemned"]) as of_condemned,
            sleeping(marks["another's"]) as of_another,
            sleeping(marks["malformed"]) as malformed,
        ):
            assert clear_dead(f"{job}/", f"{job}/b/condemned/1") == []
            for killed in (of_dead, of_condemned, condemned):
                assert killed.wait(60) == -9
            for spared in (of_living, living, of_another, malformed):
                assert spared.poll() is None
