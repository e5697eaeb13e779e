"""The steps that somebody asked to have dumped: `control/dumps.json`, and the result of each request.

The step of a request is decided and written before the step begins its boundary. So after a kill the same step is dumped, when
it is taken again. The request gets its answer once the step is committed. (A resume removes dumps of uncommitted steps.)
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import orjson
from pydantic import ValidationError

from counterpoint.orchestrator.changes import Steps
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.requests import Answer
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.files.atomic import STABLE, write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

logger = logging.getLogger(__name__)

DUMPS_FILE = "dumps.json"

MAX_BYTES = 2**16


class _File(Config):
    steps: dict[Identifier, int] = {}
    """The step of each request."""


class AskedDumps:
    """The dumps of one run. Blocks when it is made: reads the file."""

    def __init__(
        self, run_dir: Path, last_step: int, steps: Steps, between_steps: AbstractAsyncContextManager[object]
    ) -> None:
        self._run_dir = run_dir
        self._last_step = last_step
        self._steps = steps
        self._between_steps = between_steps
        self._asked = _read(run_dir)

    def is_asked(self, step: int) -> bool:
        """Whether this step is to be dumped."""
        return step in self._asked.values()

    async def take(self, request_id: str) -> Answer | None:
        """Returns the answer to a request, or None until its step is committed. Raises `OSError`."""
        if request_id not in self._asked:
            async with self._between_steps:
                step = self._steps.newest_step + 1
                if step > self._last_step:
                    reason = f"all {self._last_step} steps of the run are committed: none is left to dump"
                    return Answer(request_id=request_id, outcome="refused", reason=reason)
                await self._write({**self._asked, request_id: step})
            logger.info("step %d will be dumped", step)
            return None
        step = self._asked[request_id]
        if self._steps.newest_step < step:
            return None
        if not (self._run_dir / "raw_rollouts" / f"step_{step}" / STABLE).exists():
            reason = f"the dump of step {step} is gone"
            return Answer(request_id=request_id, outcome="refused", reason=reason)
        return Answer(request_id=request_id, outcome="done", step=step)

    async def forget(self, waiting: Collection[str]) -> None:
        """Forgets committed steps for which no request waits. Raises `OSError`."""
        newest = self._steps.newest_step
        kept = {name: step for name, step in self._asked.items() if step > newest or name in waiting}
        if kept != self._asked:
            await self._write(kept)

    async def _write(self, asked: dict[str, int]) -> None:
        await in_thread(write_atomically, _path(self._run_dir), orjson.dumps({"steps": asked}))
        self._asked = asked


def _read(run_dir: Path) -> dict[str, int]:
    """Returns the file's steps, or none if it is damaged: then the waiting requests are taken up anew."""
    try:
        return _File.model_validate(read_json(_path(run_dir), MAX_BYTES)).steps
    except FileNotFoundError:
        return {}
    except (OSError, UntrustedFileError, ValidationError) as error:
        logger.warning("%s is ignored: %s", _path(run_dir), error)
        return {}


def _path(run_dir: Path) -> Path:
    return run_dir / "control" / DUMPS_FILE
