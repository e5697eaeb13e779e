"""What a worker does with a target that it has claimed: it runs the target's process to its end, or ends it when it must.

The process lives below a guardian (`cluster/launch.py`), so that it dies with its worker however that dies. A peer that takes the
target over goes on from its checkpoints. `cli/sweep.py` has the worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import time
from collections.abc import Callable

import tomli_w

from cluster import launch
from cluster.events import ASKED_TO_END, Worker, describe_exit
from cluster.lifecycle import KILL_GRACE_SECONDS
from cluster.process import Process, last_lines
from job.check import SAFE_PATH
from job.number_format import duration
from job.run_state import exclusion_of, is_finished
from job.sweep.result import result_of
from job.sweep.targets import Target
from sweep.lease import MARGIN
from sweep.lock import Claim
from transport.files.atomic import write_atomically

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
WAITING_LOG_SECONDS = 60.0
"""Between two lines that say what is waited for."""

DRAIN_GRACE_SECONDS = 15.0
"""On top of a run's `shutdown_timeout_seconds`."""

SERVICES_STOP_SECONDS = 240.0
"""What a job's trainer and servers may take to stop after its runs."""

LAST_OUTPUT_LINES = 5
"""Lines of a process's output that an error quotes,"""
LAST_OUTPUT_CHARACTERS = 700
"""and how much of them: a record's error has room for a thousand."""


class TargetFailed(Exception):
    """The target's process has ended otherwise than it should; the message has its last output."""


async def run_target(target: Target, claim: Claim, lease_seconds: float) -> None:
    """The body of a claim. Returns when the target is done; raises `TargetFailed` when it is not and its process has ended.

    When cancelled it ends the process: at once when the lease is lost, before anybody else can have it; else it lets it drain. A
    second cancellation kills it.
    """
    await _until_it_may_start(target)
    target.file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target.file, tomli_w.dumps(target.settings).encode())
    logger.info(
        "%s: attempt %d, token %d; its output is in %s", claim.target_id, claim.attempt, claim.token, target.log_file
    )
    began = time.monotonic()
    # Half of what the lease's owner has left once it is lost: the rest is for a kill.
    abrupt = lease_seconds * MARGIN / 2
    drain = max(run.shutdown_timeout_seconds for run in target.runs) + DRAIN_GRACE_SECONDS
    drain += SERVICES_STOP_SECONDS if target.run_id is None else 0.0
    worker = Worker(claim.target_id, target.command, target.log_file, environment=SAFE_PATH)
    process = Process(worker)
    code = await _end_of(process, lambda: abrupt if claim.stop.is_set() else drain)
    if code != 0 or not all(map(is_finished, target.runs)):
        raise TargetFailed(_why(target, code, process.log_from))
    logger.info(
        "%s: done after %s, %s", claim.target_id, duration(time.monotonic() - began), result_of(target).in_words
    )


async def _until_it_may_start(target: Target) -> None:
    """A worker that was paused, or cut off from the storage, may have lost its lease and not know it: its process goes on, and
    no other may. Or the job to join has been stopped, and is to come back. Either takes what it takes; the claim is ours."""
    said_at = -math.inf
    while (obstacle := await asyncio.to_thread(target.obstacle)) is not None:
        if time.monotonic() - said_at > WAITING_LOG_SECONDS:
            said_at = time.monotonic()
            logger.info("%s: waiting for %s", target.target_id, obstacle)
        await asyncio.sleep(LOOK_SECONDS)


async def _end_of(process: Process, stop_seconds: Callable[[], float]) -> int:
    """Until the process has ended; its exit code. Cancelled, it is told to end, and killed after `stop_seconds()`. Whatever
    happens, nothing is left of it."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    handle = os.pidfd_open(process.guardian_pid)

    def notice() -> None:
        loop.remove_reader(handle)
        ended.set()

    loop.add_reader(handle, notice)
    loop.add_reader(process.notifications.fileno(), process.read_notifications)
    try:
        await ended.wait()
    except asyncio.CancelledError:
        logger.info("%s: ending its process, within %s", process.worker.name, duration(stop_seconds()))
        process.terminate()
        try:
            async with asyncio.timeout(stop_seconds()):
                await ended.wait()
        except TimeoutError:
            logger.warning("%s: its process did not end in time and is killed", process.worker.name)
        raise
    finally:
        if not ended.is_set():
            process.kill()
            select.select([handle], [], [], KILL_GRACE_SECONDS)  # milliseconds, and nothing else may come first
        loop.remove_reader(handle)
        loop.remove_reader(process.notifications.fileno())
        os.close(handle)
        process.close()
        codes = dict(launch.reap())
        launch.kill_orphans([])
    return codes[process.guardian_pid]


def _why(target: Target, code: int, log_from: int) -> str:
    exclusions = [exclusion for run in target.runs if (exclusion := exclusion_of(run.run_dir)) is not None]
    stopped = code == 0 or code in ASKED_TO_END
    how = "was stopped by somebody before it was done" if stopped else describe_exit(code)
    words = "\n".join(last_lines(target.log_file, LAST_OUTPUT_LINES, log_from))[-LAST_OUTPUT_CHARACTERS:]
    return f"{'; '.join([how, *exclusions])} ({target.log_file})\n{words}".rstrip()
