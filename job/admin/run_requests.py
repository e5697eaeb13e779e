"""What a live run can be asked for: to pause and go on, to make its newest step durable, to dump a step, to profile its loop.

`job/admin/ask.py` sends the requests; the run's orchestrator carries them out, or its trainer a checkpoint. `run/pause.py` is
what a paused run is.
"""

from __future__ import annotations

from pathlib import Path

from job.admin.ask import ANSWER_SECONDS, ask, new_request_id
from run.requests import DumpRequest, PauseRequest, ProfileRequest, ResumeRequest, SaveRequest
from transport.config import Config

SAVE_SECONDS = 300.0
"""How long to wait, unless the caller says otherwise: a large optimizer takes its time."""

DUMP_SECONDS = 600.0
"""How long to wait, unless the caller says otherwise: the next step has to be generated first."""


class Paused(Config, frozen=True):
    """Whether a run is paused."""

    run_id: str
    """The run's id."""
    paused: bool
    """Whether it is."""
    step: int
    """Its newest committed step."""


def pause_run(
    job: Path, run_id: str, reason: str = "", *, timeout: float = ANSWER_SECONDS, request_id: str | None = None
) -> Paused:
    """Pauses a run: no group starts; what is in flight finishes. It stays paused over restarts of its orchestrator.

    A run that is paused already stays so. Raises as `ask.ask`.
    """
    answer = ask(job, run_id, PauseRequest, {"reason": reason}, request_id, timeout)
    return Paused(run_id=run_id, paused=True, step=answer.step or 0)


def resume_run(job: Path, run_id: str, *, timeout: float = ANSWER_SECONDS, request_id: str | None = None) -> Paused:
    """Lets a paused run go on; one that is not paused just does. Raises as `ask.ask`."""
    answer = ask(job, run_id, ResumeRequest, {}, request_id, timeout)
    return Paused(run_id=run_id, paused=False, step=answer.step or 0)


class Saved(Config, frozen=True):
    """A durable step."""

    run_id: str
    """The run's id."""
    step: int
    """The step."""
    directory: Path
    """The checkpoint, which is kept until somebody removes it."""


def checkpoint_now(job: Path, run_id: str, *, timeout: float = SAVE_SECONDS, request_id: str | None = None) -> Saved:
    """Writes a checkpoint of the newest trained step, and keeps it. Raises as `ask.ask`."""
    answer = ask(job, run_id, SaveRequest, {}, request_id, timeout)
    step = answer.step or 0
    return Saved(run_id=run_id, step=step, directory=job / "trainer" / run_id / "saved" / f"step_{step}")


class Dumped(Config, frozen=True):
    """The dump of a step, for `counterpoint replay`."""

    run_id: str
    """The run's id."""
    step: int
    """The step."""
    directory: Path
    """The dump."""


def dump_next_step(job: Path, run_id: str, *, timeout: float = DUMP_SECONDS, request_id: str | None = None) -> Dumped:
    """Waits for the next step of the run and returns its dump. Raises as `ask.ask`."""
    answer = ask(job, run_id, DumpRequest, {}, request_id, timeout)
    step = answer.step or 0
    return Dumped(run_id=run_id, step=step, directory=job / f"run_{run_id}" / "raw_rollouts" / f"step_{step}")


class Profiled(Config, frozen=True):
    """A profile of an orchestrator's event loop."""

    run_id: str
    """The run's id."""
    name: str
    """Names the profile."""
    seconds: float
    """How long it lasts."""
    speedscope: Path
    """JSON for https://www.speedscope.app."""
    collapsed: Path
    """A line for each stack, with its microseconds."""


def profile_loop(
    job: Path, run_id: str, seconds: float = 10.0, *, timeout: float | None = None, request_id: str | None = None
) -> Profiled:
    """Samples the loop for `seconds`, at most 300. Raises as `ask.ask`; `Refused` while another profile is being taken."""
    name = request_id or new_request_id()
    ask(job, run_id, ProfileRequest, {"seconds": seconds}, name, timeout or seconds + ANSWER_SECONDS)
    directory = job / f"run_{run_id}" / "profiles"
    return Profiled(
        run_id=run_id,
        name=name,
        seconds=seconds,
        speedscope=directory / f"{name}.speedscope.json",
        collapsed=directory / f"{name}.collapsed.txt",
    )
