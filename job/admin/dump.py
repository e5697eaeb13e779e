"""Has the next step of a run dumped in full, for `counterpoint replay`. Its orchestrator carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from job.admin.ask import ask
from run.requests import DumpRequest

DUMP_SECONDS = 600.0
"""How long to wait, unless the caller says otherwise: the next step has to be generated first."""


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
