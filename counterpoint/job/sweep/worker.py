"""One worker of a sweep: claims targets and runs them until none is left, or until a signal stops it.

`sweep.claim` decides which target is this worker's, `counterpoint/job/sweep/target_process.py` runs it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from counterpoint.job.sweep.target_process import run_target
from counterpoint.job.sweep.targets import SweepConfig, Target
from counterpoint.job.sweep.telemetry import WorkerTelemetry
from counterpoint.sweep.claim import SweepFailed, SweepTarget, claim_and_run_async
from counterpoint.sweep.lock import Claim, PreviousTaskFailed
from counterpoint.sweep.open_store import open_store
from counterpoint.sweep.record import RecordError
from counterpoint.sweep.store import UnsafeStoreError
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.notify import Heartbeat, notify_ready
from counterpoint.transport.process.stop_requests import StopRequests

Body = Callable[[SweepTarget[Target], Claim], Coroutine[Any, Any, None]]

logger = logging.getLogger(__name__)

STAY_FAILED = 3
"""Exit code when targets stay FAILED. A controller takes 3 as final: a worker that is started again finds nothing to do."""


def check_store(config: SweepConfig, file: str) -> None:
    """Raises `UserError` if the sweep's root names no usable storage. `file` is the sweep's, for the message."""
    try:
        open_store(config.store)
    except (UnsafeStoreError, ValueError, ImportError) as error:
        raise UserError(f"{file}: root = {config.root!r}: {error}") from None


async def run_worker(config: SweepConfig, targets: Sequence[Target]) -> int:
    """Works until every target reads SUCCESS, until some stay FAILED, or until a signal.

    Returns the exit code: 0, `STAY_FAILED`, or 128 + the signal's number. Raises `UserError` for a storage that cannot hold a
    sweep.
    """

    async def body(target: SweepTarget[Target], claim: Claim) -> None:
        with telemetry.claimed():
            await run_target(target.config, claim, config.lease_seconds)

    with WorkerTelemetry(config, targets) as telemetry:
        return await _work(config, targets, body)


async def _work(config: SweepConfig, targets: Sequence[Target], body: Body) -> int:
    """Runs the body for each target that this worker claims; returns as `run_worker`."""
    work = asyncio.ensure_future(
        claim_and_run_async(
            config.store,
            [SweepTarget(target.target_id, target, target.values) for target in targets],
            body,
            max_attempts=config.max_attempts,
            keep_going=True,
            heartbeat=config.heartbeat_seconds,
            lease=config.lease_seconds,
        )
    )
    received = _cancel_on_signals(work)
    notify_ready()
    beating = asyncio.ensure_future(_beat())
    try:
        await work
    except asyncio.CancelledError:
        return 128 + received[0]
    except UnsafeStoreError as error:
        raise UserError(str(error)) from None
    except SweepFailed as error:
        for failure in error.exceptions:
            if isinstance(failure, PreviousTaskFailed | RecordError):  # failures of our own attempts are logged already
                logger.error("%s", failure)
        logger.error("%s; a larger max_attempts has them tried again", error.message)
        return STAY_FAILED
    finally:
        beating.cancel()
    for gone in filter(None, (target.missing_output() for target in targets)):
        logger.warning("%s", gone)
    logger.info("every target of %s reads SUCCESS", config.name)
    return 0


async def _beat() -> None:
    """Shows a supervisor that the loop runs."""
    heartbeat = Heartbeat()
    while heartbeat.period is not None:
        heartbeat.beat()
        await asyncio.sleep(heartbeat.period)


def _cancel_on_signals(work: asyncio.Future[None]) -> list[signal.Signals]:
    """Cancels `work` on the first signal, which drains the target and gives it back, and on the second, which kills it.

    Returns the list to which each received signal is appended.
    """
    received: list[signal.Signals] = []
    requests = StopRequests()

    def cancel(number: signal.Signals) -> None:
        if requests.note() == 0:
            return
        received.append(number)
        logger.info("%s: %s", number.name, "ending at once" if len(received) > 1 else "giving back what is claimed")
        work.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # nohup started the process, so it outlives its terminal
        asyncio.get_running_loop().add_signal_handler(number, cancel, number)
    return received
