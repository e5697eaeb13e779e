"""Samples what the event loop of a run's orchestrator does for some seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from job.admin.ask import ANSWER_SECONDS, ask, new_request_id
from run.requests import ProfileRequest


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
