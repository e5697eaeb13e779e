"""Pauses a run and lets it go on. `run/pause.py` is what a paused run is; its orchestrator carries the requests out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from job.admin.ask import ANSWER_SECONDS, ask
from run.requests import PauseRequest, ResumeRequest


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
