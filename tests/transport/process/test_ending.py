"""A process that ends at once has said all that it had to say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.polling import DEADLINE_SECONDS

PROGRAM = """
import atexit, sys
from counterpoint.transport.process.ending import end_at_once

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
atexit.register(print, "registered")
sys.stdout.write("printed\\n")
sys.stderr.write("told")
end_at_once(3, wait_for_threads=False)
"""


def test_what_was_printed_and_registered_is_done_and_nothing_is_taken_apart() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed\nregistered\n", "told")


def test_a_process_whose_output_is_closed_ends_with_its_code() -> None:
    command = [
        "sh",
        "-c",
        'exec "$0" -c "$1" >&-',
        sys.executable,
        PROGRAM.replace('sys.stdout.write("printed\\n")', ""),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "told")


POOLS = """
import sys, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from counterpoint.transport.process.ending import end_at_once

def work():
    time.sleep(0.1)
    print("worked")

processes, threads = ProcessPoolExecutor(1), ThreadPoolExecutor(1)
processes.submit(abs, 1).result()
threads.submit(work)
end_at_once(0, wait_for_threads=True)
"""


@pytest.mark.slow
def test_pools_that_nobody_shut_down_end_with_their_work() -> None:
    done = subprocess.run(
        [sys.executable, "-c", POOLS], capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "worked\n", "")
