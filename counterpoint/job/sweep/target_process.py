"""Runs the process of a claimed target to its end, or ends it if the claim is lost or the worker is stopped.

The process has a guardian (`transport/process/launch.py`), so that it dies with its worker however that dies. A worker that
takes over the target resumes from its checkpoints. `counterpoint/job/sweep/worker.py` claims the targets.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable

import tomli_w

from counterpoint.job.check import SAFE_PATH
from counterpoint.job.number_format import duration
from counterpoint.job.reading.run_state import exclusion_of, is_finished
from counterpoint.job.sweep.result import result_of
from counterpoint.job.sweep.targets import Target
from counterpoint.sweep.lease import MARGIN
from counterpoint.sweep.lock import Claim
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.printable import ending
from counterpoint.transport.process import launch
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.exit_codes import ASKED_TO_END, describe_exit

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
WAITING_LOG_SECONDS = 60.0
"""Seconds between two log lines about the same wait."""

DRAIN_GRACE_SECONDS = 15.0
"""Added to a run's `shutdown_timeout_seconds`."""

SERVICES_STOP_SECONDS = 240.0
"""Time limit for a job's trainer and servers to stop after its runs."""

LAST_OUTPUT_LINES = 5
"""Last lines of a process's output that an error quotes."""
LAST_OUTPUT_CHARACTERS = 700
"""Most characters of these lines: the error in a target's record holds a thousand."""


class TargetFailed(Exception):
    """The target's process ended before the target was done; the message quotes the end of its output."""


async def run_target(target: Target, claim: Claim, lease_seconds: float) -> None:
    """Runs a claimed target until it is done. Raises `TargetFailed` if its process ends before that.

    A cancellation ends the process: at once if the lease is lost, before another worker can claim the target; otherwise it
    drains. A second cancellation kills it.
    """
    await _wait_until_startable(target)
    target.file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target.file, tomli_w.dumps(target.settings).encode())
    logger.info(
        "%s: attempt %d, token %d; its output is in %s", claim.target_id, claim.attempt, claim.token, target.log_file
    )
    began = time.monotonic()
    # Half of the time between the loss of the lease and another worker's claim; the other half is for a kill.
    abrupt = lease_seconds * MARGIN / 2
    drain = drain_seconds(target)
    variables = {**os.environ, **SAFE_PATH, "PYTHONUNBUFFERED": "1"}
    process = Child(claim.target_id, target.command, environment=variables, log=target.log_file)
    code = await _wait_for_end(process, lambda: abrupt if claim.stop.is_set() else drain)
    if code != 0 or not all(map(is_finished, target.runs)):
        raise TargetFailed(_describe_failure(target, code, process))
    logger.info(
        "%s: done after %s, %s", claim.target_id, duration(time.monotonic() - began), result_of(target).description
    )


def drain_seconds(target: Target) -> float:
    """Returns how long the target's process may take to end in order."""
    run = max(run.shutdown_timeout_seconds for run in target.runs) + DRAIN_GRACE_SECONDS
    return run if target.run_id is not None else run + SERVICES_STOP_SECONDS


async def _wait_until_startable(target: Target) -> None:
    """Waits, without limit, until the target has no process and the job to join runs.

    A worker that was paused or cut off from the storage may have lost its lease while its process still runs. A job to join may
    have been stopped for a while. The claim is kept meanwhile.
    """
    logged_at = -math.inf
    while (obstacle := await asyncio.to_thread(target.obstacle)) is not None:
        if time.monotonic() - logged_at > WAITING_LOG_SECONDS:
            logged_at = time.monotonic()
            logger.info("%s: waiting for %s", target.target_id, obstacle)
        await asyncio.sleep(POLL_SECONDS)


async def _wait_for_end(process: Child, stop_seconds: Callable[[], float]) -> int:
    """Waits for the end of the process; returns its exit code.

    A cancellation sends SIGTERM, and a kill after `stop_seconds()`. In any case no descendant of the process is left.
    """
    try:
        return await process.ended()
    except asyncio.CancelledError:
        logger.info("%s: ending its process, within %s", process.name, duration(stop_seconds()))
        process.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(stop_seconds()):
                await process.ended()
        except TimeoutError:
            logger.warning("%s: its process did not end in time and is killed", process.name)
        raise
    finally:
        process.kill()  # takes milliseconds; nothing else may run before it
        launch.reap()
        launch.kill_orphans([])


def _describe_failure(target: Target, code: int, process: Child) -> str:
    exclusions = [exclusion for run in target.runs if (exclusion := exclusion_of(run.run_dir)) is not None]
    early = f"{describe_exit(code)} before its runs were complete"
    how = "was stopped before it was done" if code in ASKED_TO_END else early if code == 0 else describe_exit(code)
    output = ending("\n".join(process.last_lines(LAST_OUTPUT_LINES)), LAST_OUTPUT_CHARACTERS)
    return f"{'; '.join([how, *exclusions])} ({target.log_file})\n{output}".rstrip()
