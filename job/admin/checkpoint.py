"""Makes a run's newest step durable at once, and keeps that checkpoint. The trainer carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from job.admin.ask import ask
from run.requests import SaveRequest

SAVE_SECONDS = 300.0
"""How long to wait, unless the caller says otherwise: a large optimizer takes its time."""


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
