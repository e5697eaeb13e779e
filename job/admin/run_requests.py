"""What a live run can be asked for: to pause and go on, to make its newest step durable, to dump a step, to profile its loop.

`job/admin/ask.py` sends the requests; the run's orchestrator carries them out, or its trainer a checkpoint. `run/pause.py` is
what a paused run is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from job.admin.ask import ANSWER_SECONDS, ask, new_request_id
from run.requests import DumpRequest, PauseRequest, ProfileRequest, ResumeRequest, SaveRequest

SAVE_SECONDS = 300.0
"""How long to wait, unless the caller says otherwise: a large optimizer takes its time."""

DUMP_SECONDS = 600.0
"""How long to wait, unless the caller says otherwise: the next step has to be generated first."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Whether a run is paused, and its newest committed step."""

    run_id: str
    paused: bool
    step: int


def pause_run(
    job: Path, run_id: str, reason: str = "", *, timeout: float = ANSWER_SECONDS, request_id: str | None = None
) -> Paused:
    """Pauses a run: no group starts; what is in flight finishes. It stays paused over restarts of its orchestrator.

    A run that is paused already stays so. Raises as `ask.ask`.
    """
    answer = ask(job, run_id, PauseRequest, {"reason": reason}, request_id, timeout)
    return Paused(run_id, True, answer.step or 0)


def resume_run(job: Path, run_id: str, *, timeout: float = ANSWER_SECONDS, request_id: str | None = None) -> Paused:
    """Lets a paused run go on; one that is not paused just does. Raises as `ask.ask`."""
    answer = ask(job, run_id, ResumeRequest, {}, request_id, timeout)
    return Paused(run_id, False, answer.step or 0)


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable step."""

    run_id: str
    step: int
    directory: Path
    """The checkpoint that is kept until somebody removes it (`job.population.exploit.forget_saved`)."""


def checkpoint_now(job: Path, run_id: str, *, timeout: float = SAVE_SECONDS, request_id: str | None = None) -> Saved:
    """Writes a checkpoint of the newest trained step, and keeps it. Raises as `ask.ask`."""
    answer = ask(job, run_id, SaveRequest, {}, request_id, timeout)
    step = answer.step or 0
    return Saved(run_id, step, job / "trainer" / run_id / "saved" / f"step_{step}")


@dataclass(frozen=True, slots=True)
class Dumped:
    """The dump of one step."""

    run_id: str
    step: int
    directory: Path


def dump_next_step(job: Path, run_id: str, *, timeout: float = DUMP_SECONDS, request_id: str | None = None) -> Dumped:
    """Waits for the next step of the run and returns its dump. Raises as `ask.ask`."""
    answer = ask(job, run_id, DumpRequest, {}, request_id, timeout)
    step = answer.step or 0
    return Dumped(run_id, step, job / f"run_{run_id}" / "raw_rollouts" / f"step_{step}")


@dataclass(frozen=True, slots=True)
class Profiled:
    """The files of one profile, both of the same samples."""

    run_id: str
    name: str
    seconds: float
    speedscope: Path
    """JSON of https://www.speedscope.app, whose page draws a flame graph of it."""
    collapsed: Path
    """A line for each stack, outermost first: `a;b;c MICROSECONDS`, as flamegraph.pl reads."""


def profile_loop(
    job: Path, run_id: str, seconds: float = 10.0, *, timeout: float | None = None, request_id: str | None = None
) -> Profiled:
    """Samples the loop for `seconds`, at most 300. Raises as `ask.ask`; `Refused` while another profile is being taken."""
    name = request_id or new_request_id()
    ask(job, run_id, ProfileRequest, {"seconds": seconds}, name, timeout or seconds + ANSWER_SECONDS)
    directory = job / f"run_{run_id}" / "profiles"
    return Profiled(run_id, name, seconds, directory / f"{name}.speedscope.json", directory / f"{name}.collapsed.txt")
