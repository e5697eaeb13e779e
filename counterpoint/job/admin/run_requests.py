"""What a live run can be asked for: to pause and go on, to make its newest step durable, to dump a step, to profile its loop.

`counterpoint/job/admin/ask.py` sends the requests; the run's orchestrator carries them out, or its trainer a checkpoint.
`counterpoint/run/pause.py` is what a paused run is. Each function raises as `ask.ask`, after `wait_seconds` at the latest.
"""

from __future__ import annotations

from pathlib import Path

from counterpoint.job.admin.ask import ANSWER_SECONDS, VerbOutcome, ask
from counterpoint.run.requests import DumpRequest, PauseRequest, ProfileRequest, ResumeRequest, SaveRequest
from counterpoint.run.trainer_files import saved_directory

SAVE_SECONDS = 300.0
"""How long to wait, unless the caller says otherwise: a large optimizer takes its time."""

DUMP_SECONDS = 600.0
"""How long to wait, unless the caller says otherwise: the next step has to be generated first."""


class Paused(VerbOutcome, frozen=True):
    """Whether a run is paused."""

    paused: bool
    """Whether the run is paused."""
    step: int
    """Its newest committed step."""


def pause_run(job: Path, run_id: str, asked: PauseRequest, wait_seconds: float = ANSWER_SECONDS) -> Paused:
    """Pauses a run: no group starts; what is in flight finishes. It stays paused over restarts of its orchestrator.

    A run that is paused already stays so.
    """
    step = ask(job, run_id, asked, wait_seconds).step or 0
    return Paused(run_id=run_id, sentence=f"run {run_id} is paused, after step {step}", paused=True, step=step)


def resume_run(job: Path, run_id: str, asked: ResumeRequest, wait_seconds: float = ANSWER_SECONDS) -> Paused:
    """Lets a paused run go on; one that is not paused just does."""
    step = ask(job, run_id, asked, wait_seconds).step or 0
    return Paused(run_id=run_id, sentence=f"run {run_id} goes on, after step {step}", paused=False, step=step)


class Saved(VerbOutcome, frozen=True):
    """A durable step."""

    step: int
    """The step."""
    directory: Path
    """The checkpoint, which is kept until somebody removes it."""


def checkpoint_now(job: Path, run_id: str, asked: SaveRequest, wait_seconds: float = SAVE_SECONDS) -> Saved:
    """Writes a checkpoint of the newest trained step, and keeps it."""
    step = ask(job, run_id, asked, wait_seconds).step or 0
    directory = saved_directory(job, run_id) / f"step_{step}"
    sentence = f"step {step} of run {run_id} is durable: {directory}"
    return Saved(run_id=run_id, sentence=sentence, step=step, directory=directory)


class Dumped(VerbOutcome, frozen=True):
    """The dump of a step, for `counterpoint replay`."""

    step: int
    """The step."""
    directory: Path
    """The directory of the dump."""


def dump_next_step(job: Path, run_id: str, asked: DumpRequest, wait_seconds: float = DUMP_SECONDS) -> Dumped:
    """Waits for the next step of the run and returns its dump."""
    step = ask(job, run_id, asked, wait_seconds).step or 0
    directory = job / f"run_{run_id}" / "raw_rollouts" / f"step_{step}"
    return Dumped(run_id=run_id, sentence=f"step {step} of run {run_id}: {directory}", step=step, directory=directory)


class Profiled(VerbOutcome, frozen=True):
    """A profile of an orchestrator's event loop."""

    name: str
    """The name of the profile."""
    seconds: float
    """How long it lasts."""
    speedscope: Path
    """JSON for https://www.speedscope.app."""
    collapsed: Path
    """A line for each stack, with its microseconds."""


def profile_loop(job: Path, run_id: str, asked: ProfileRequest, wait_seconds: float = ANSWER_SECONDS) -> Profiled:
    """Samples the loop for the seconds that are asked, and waits so long and `wait_seconds` for the answer.

    Raises `Refused` while another profile is being taken.
    """
    ask(job, run_id, asked, asked.seconds + wait_seconds)
    path = job / f"run_{run_id}" / "profiles" / asked.request_id
    speedscope, collapsed = Path(f"{path}.speedscope.json"), Path(f"{path}.collapsed.txt")
    sentence = (
        f"{asked.seconds:g} s of run {run_id}\n  for https://www.speedscope.app: {speedscope}\n"
        f"  for flamegraph.pl: {collapsed}"
    )
    return Profiled(
        run_id=run_id,
        sentence=sentence,
        name=asked.request_id,
        seconds=asked.seconds,
        speedscope=speedscope,
        collapsed=collapsed,
    )
