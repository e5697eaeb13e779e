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

from orchestrator.config import OrchestratorConfig
from orchestrator.sender import NoTrainerError, Sender
from orchestrator.threads import in_thread
from transport.atomic import published_steps

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 30.0
"""How long a trainer that is away is waited for although all is durable: one that is about to come waits for our `BYE`."""

_POLL_SECONDS = 0.2


async def until_durable(sender: Sender, config: OrchestratorConfig, on_progress: Callable[[], None]) -> None:
    """Until a checkpoint of the trainer covers the last step, by its word or by what lies in its directory.

    A trainer that went away is waited for without a limit. Raises `NoTrainerError` when none has come within
    `trainer_timeout_seconds` and there is no such checkpoint either.
    """
    durable = asyncio.ensure_future(sender.wait_durable(config.steps))
    seen, unacknowledged = time.monotonic(), sender.unacknowledged
    try:
        while not durable.done():
            await asyncio.wait({durable}, timeout=_POLL_SECONDS)
            if sender.has_trainer:
                seen = time.monotonic()
            if unacknowledged != sender.unacknowledged:
                unacknowledged = sender.unacknowledged
                on_progress()
            away = time.monotonic() - seen
            if away > min(FAREWELL_SECONDS, config.trainer_timeout_seconds) and await in_thread(_checkpointed, config):
                logger.info("the trainer has left, and its checkpoint covers step %d", config.steps)
                await sender.forget_up_to(config.steps)
            elif away > config.trainer_timeout_seconds and not sender.had_trainer:
                raise NoTrainerError(config.run_id, config.trainer_timeout_seconds)
        await durable
    finally:
        durable.cancel()
        with suppress(asyncio.CancelledError):
            await durable


def _checkpointed(config: OrchestratorConfig) -> bool:
    steps = published_steps(config.output_dir / "trainer" / config.run_id / "checkpoints")
    return max(steps, default=0) >= config.steps
