"""The end of a run: all its steps are committed here, and what remains is the trainer's checkpoint of the last one.

A trainer that is there says so. One that has left, its work done, left its checkpoint in the job's directory; so an
orchestrator that was killed before it heard of the end comes to it all the same. Inference is needed no more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from orchestrator.loop_health.threads import in_thread
from orchestrator.step.sender import NoTrainerError, Sender
from run.config import RunConfig
from transport.files.atomic import published_steps

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 30.0
"""How long to wait for the trainer's word although its checkpoint is there: one that is about to come waits for our `BYE`."""

_POLL_SECONDS = 0.5


async def until_durable(sender: Sender, config: RunConfig, on_progress: Callable[[], None]) -> None:
    """Until a checkpoint of the trainer covers the last step, by its word or by what lies in its directory.

    A trainer that went away is waited for without a limit. Raises `NoTrainerError` when none has been heard of for
    `trainer_timeout_seconds` and there is no such checkpoint either.
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
                logger.info("the trainer says nothing, but has left its checkpoint of the last step")
                await sender.forget_up_to(config.steps)
                return
            unheard = time.monotonic() - max(since, sender.last_message_at)
            if unheard > config.trainer_timeout_seconds and not sender.had_trainer:
                raise NoTrainerError(config.run_id, config.trainer_timeout_seconds)
    finally:
        durable.cancel()
        with suppress(asyncio.CancelledError):
            await durable


def _checkpointed(config: RunConfig) -> bool:
    steps = published_steps(config.output_dir / "trainer" / config.run_id / "checkpoints")
    return max(steps, default=0) >= config.steps
