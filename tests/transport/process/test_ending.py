"""A process that ends at once has said all that it had to say."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys
from transport.process.ending import end_at_once

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
atexit.register(print, "registered")
sys.stdout.write("printed\\n")
sys.stderr.write("told")
end_at_once(3)
"""


def test_what_was_printed_and_registered_is_done_and_nothing_is_taken_apart() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed\nregistered\n", "told")
