"""A worker with one target `only` (and one that is never come to), for tests that send it signals: `BODY ROOT NOTES`.

A body leaves empty files in the directory NOTES: `began`, and what became of it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

from counterpoint.sweep.claim import SweepTarget, claim_and_run
from counterpoint.sweep.lock import Claim

DEADLINE_SECONDS = 60.0

_root, _notes = sys.argv[2], Path(sys.argv[3])


def function(target: SweepTarget[None], claim: Claim) -> None:
    """Waits to be interrupted."""
    try:
        note("began")
        time.sleep(DEADLINE_SECONDS)
    finally:
        note("cleaned-up")


async def coroutine(target: SweepTarget[None], claim: Claim) -> None:
    """The same."""
    try:
        note("began")
        await asyncio.sleep(DEADLINE_SECONDS)
    finally:
        note("cleaned-up")


def zombie(target: SweepTarget[None], claim: Claim) -> None:
    """Outlives its lease: until it may go on, it does not look whether it is to stop."""
    if claim.token == 1:
        note("began")
        while not (_notes / "go-on").exists():
            time.sleep(0.01)
        assert claim.stop.wait(DEADLINE_SECONDS)
        note("told")


def note(name: str) -> None:
    """For the test to see."""
    (_notes / name).touch()


if __name__ == "__main__":
    # Whatever started the tests: Ctrl-C means what it does in a terminal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1] == "zombie":
        claim_and_run(_root, [SweepTarget("only", None)], zombie, heartbeat=0.1, lease=0.6)
    else:
        body = {"function": function, "coroutine": coroutine}[sys.argv[1]]
        claim_and_run(_root, [SweepTarget("only", None), SweepTarget("zz-next", None)], body)
