"""The end of a run: it has committed all steps here, and awaits the trainer's checkpoint of the last one.

A connected trainer reports the checkpoint. A trainer that is done and has left is recognised by its checkpoint in the job's
directory, so an orchestrator that was killed before the report ends as well. Inference is not needed any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from counterpoint.orchestrator.step.sender import Sender
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.transport.files.atomic import published_steps

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 30.0
"""Seconds to wait for the trainer's report if its checkpoint is there: a trainer that is still starting waits for our `BYE`."""

_POLL_SECONDS = 0.5


async def until_durable(sender: Sender, config: RunConfig, on_progress: Callable[[], None]) -> None:
    """Waits until a checkpoint of the trainer covers the last step, as its messages or its directory show.

    Waits without a limit for a trainer that was connected once. Raises `NoTrainerError` when no trainer has sent a message for
    `trainer_timeout_seconds` and there is no such checkpoint.
    """
    durable = asyncio.ensure_future(sender.wait_durable(config.steps))
    unacknowledged, since = sender.unacknowledged, time.monotonic()
    try:
        while not durable.done():
            await asyncio.wait({durable}, timeout=_POLL_SECONDS)
            if unacknowledged != sender.unacknowledged:
                unacknowledged, since = sender.unacknowledged, time.monotonic()
                on_progress()
            silence = time.monotonic() - since
            if silence > min(SILENCE_SECONDS, config.trainer_timeout_seconds) and await in_thread(
                _checkpointed, config
            ):
                logger.info("no message from the trainer, but its checkpoint of the last step exists")
                await sender.forget_up_to(config.steps)
                return
            unheard = time.monotonic() - max(since, sender.last_message_at)
            if unheard > config.trainer_timeout_seconds and not sender.had_trainer:
                raise sender.no_trainer(config.trainer_timeout_seconds)
    finally:
        durable.cancel()
        with suppress(asyncio.CancelledError):
            await durable


async def first_version(sender: Sender, config: RunConfig) -> int:
    """Returns the policy version that inference serves first: that of the trainer's READY.

    A run with only evaluations left takes the last version from a trainer that is done and has left. Raises `NoTrainerError`.
    """
    if sender.newest_step >= config.steps and await in_thread(_left_weights, config):
        return config.steps
    return (await sender.wait_ready(config.trainer_timeout_seconds)).next_step - 1


def _left_weights(config: RunConfig) -> bool:
    return _checkpointed(config) and config.steps in published_steps(config.run_dir / "broadcast")


def _checkpointed(config: RunConfig) -> bool:
    steps = published_steps(checkpoints_directory(config.output_dir, config.run_id))
    return max(steps, default=0) >= config.steps
