"""Takes up requests to the run (`counterpoint/run/requests.py`): changes, pauses, dumps, profiles.

Each kind has a file: `orchestrator/changes.py`, `counterpoint/run/pause.py`, `orchestrator/step/asked_dumps.py` and
`counterpoint/run/loop_health/profile.py`. This one looks for requests, carries them out one after the other, and answers. A
profile takes long, so it is taken beside the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast, get_args

from counterpoint.environments.describe_error import describe_error
from counterpoint.orchestrator.changes import Changes, Steps
from counterpoint.orchestrator.metrics import MetricsLine
from counterpoint.orchestrator.step.asked_dumps import AskedDumps
from counterpoint.run.loop_health.profile import profile_loop, write_profile
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.pause import Pause, read_pause, remove_pause, write_pause
from counterpoint.run.requests import (
    Answer,
    ChangeRequest,
    DamagedRequest,
    DumpRequest,
    OrchestratorRequest,
    PauseRequest,
    ProfileRequest,
    ResumeRequest,
    waiting_requests,
    write_answer,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Seconds between two looks for requests."""

KINDS = tuple(request.model_fields["kind"].default for request in get_args(OrchestratorRequest))

PROFILES = "profiles"
"""Folder in the run's directory."""


class Steering:
    """The requests to one run."""

    def __init__(
        self,
        run_dir: Path,
        *,
        changes: Changes,
        dumps: AskedDumps,
        steps: Steps,
        set_paused: Callable[[Pause | None], None],
        every_poll: Callable[[], None],
    ) -> None:
        """Calls `set_paused`, on the loop, with each pause and with None at its end, and `every_poll` about twice a second."""
        self._run_dir = run_dir
        self._changes = changes
        self._dumps = dumps
        self._steps = steps
        self._set_paused = set_paused
        self._every_poll = every_poll
        self._taking = asyncio.Lock()
        self._profiling: asyncio.Task[None] | None = None
        self._profiled = ""
        """The request of the profile in progress."""

    def annotation(self, step: int) -> MetricsLine:
        """Returns the changes for the metrics line of a step."""
        return self._changes.annotation(step)

    def is_dump_asked(self, step: int) -> bool:
        """Whether somebody asked for a dump of this step."""
        return self._dumps.is_asked(step)

    async def run(self) -> None:
        """Takes up requests until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(POLL_SECONDS)
                self._every_poll()
                await self.take_all(tasks)

    async def take_all(self, tasks: asyncio.TaskGroup | None = None) -> None:
        """Takes up the requests that wait. If the directory cannot be written, logs that and takes them up later.

        Without `tasks`, before the run has begun or when it is over, profiles wait.
        """
        try:
            async with self._taking:
                found = await in_thread(_requests, self._run_dir)
                for request in found:
                    await self._take(request, tasks)
                await self._dumps.forget([request.request_id for request in found])
        except OSError as error:
            logger.warning("requests to the run in %s cannot be taken up: %s", self._run_dir, error)

    async def _take(self, request: OrchestratorRequest, tasks: asyncio.TaskGroup | None) -> None:
        match request:
            case ChangeRequest():
                await self._changes.take(request)
            case PauseRequest():
                await self._pause(request)
            case ResumeRequest():
                await self._resume(request)
            case DumpRequest():
                answer = await self._dumps.take(request.request_id)
                if answer is not None:
                    await in_thread(write_answer, self._run_dir, answer, request)
            case ProfileRequest() if tasks is not None:
                await self._begin_profile(request, tasks)

    # --- pause ---

    async def _pause(self, request: PauseRequest) -> None:
        if await in_thread(read_pause, self._run_dir) is None:
            pause = Pause(since=time.time(), reason=request.reason)
            await in_thread(write_pause, self._run_dir, pause)
            self._set_paused(pause)
        await self._done(request)

    async def _resume(self, request: ResumeRequest) -> None:
        await in_thread(remove_pause, self._run_dir)
        self._set_paused(None)
        await self._done(request)

    async def _done(self, request: OrchestratorRequest) -> None:
        answer = Answer(request_id=request.request_id, outcome="done", step=self._steps.newest_step)
        await in_thread(write_answer, self._run_dir, answer, request)

    # --- profile ---

    async def _begin_profile(self, request: ProfileRequest, tasks: asyncio.TaskGroup) -> None:
        if self._profiled == request.request_id:
            return  # in progress, or taken and not written
        if self._profiling is None or self._profiling.done():
            self._profiled = request.request_id
            self._profiling = tasks.create_task(self._profile(request), name="profile")
        else:
            answer = Answer(request_id=request.request_id, outcome="refused", reason="another profile is being taken")
            await in_thread(write_answer, self._run_dir, answer, request)

    async def _profile(self, request: ProfileRequest) -> None:
        logger.info("the event loop is profiled for %g s", request.seconds)
        try:
            profile = await profile_loop(request.seconds)
            await write_profile(self._run_dir / PROFILES, request.request_id, profile)
            answer = Answer(request_id=request.request_id, outcome="done", step=self._steps.newest_step)
        except Exception as error:  # noqa: BLE001 - a profile that fails is no reason to end the run
            logger.warning("the profile %s failed: %s", request.request_id, describe_error(error))
            reason = f"the profile failed: {describe_error(error)}"
            answer = Answer(request_id=request.request_id, outcome="refused", reason=reason)
        try:
            await in_thread(write_answer, self._run_dir, answer, request)
        except OSError as error:
            logger.warning("the profile %s cannot be answered: %s", request.request_id, error)


def _requests(run_dir: Path) -> Sequence[OrchestratorRequest]:
    """Returns the requests that wait, without damaged ones, which the trainer refuses."""
    found = [request for _, request in waiting_requests(run_dir, KINDS)]
    return [cast(OrchestratorRequest, request) for request in found if not isinstance(request, DamagedRequest)]
