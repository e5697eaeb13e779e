"""How far the supervised fine-tuning is with which a job begins (`counterpoint/job/fine_tuning.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from counterpoint.job.directory import JOB_FILE, steps_of
from counterpoint.job.directory import read_json as read_job
from counterpoint.job.reading.metrics.metrics_lines import Follower
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import read_json

DIRECTORY = "sft"
DONE = "done.json"
RUN_ID = "sft"

FINE_TUNING = "fine-tuning"
"""The state of a job's runs until its fine-tuning is done."""

MOST_BYTES = 2**24
"""The most bytes of `done.json`."""

NEWEST_BYTES = 2**16
"""The bytes that are read at the end of its metrics, which say how far it is."""


@dataclass(frozen=True, slots=True)
class FineTuning:
    """How far a job's fine-tuning is."""

    step: int
    steps: int | None
    """The steps of the whole; None until the data is read."""
    weights: Path | None
    """The result; None until it is done."""

    def as_json(self) -> dict[str, int | str | None]:
        """Returns the figures for programs."""
        return {
            "step": self.step,
            "steps": self.steps,
            "weights": str(self.weights) if self.weights is not None else None,
        }

    def __str__(self) -> str:
        if self.weights is not None:
            return f"supervised fine-tuning is done: {self.step} steps, weights in {self.weights}"
        return f"supervised fine-tuning: step {self.step}/{self.steps or '?'}; rollouts begin after it"


def fine_tuning_of(directory: Path) -> FineTuning | None:
    """Returns how far the fine-tuning of the job in `directory` is; None if it has none. Raises `UserError` for damaged files."""
    own = directory / DIRECTORY
    if not own.is_dir():
        return None
    try:
        done = read_json(own / DONE, MOST_BYTES)
        return FineTuning(int(done["steps"]), int(done["steps"]), own / str(done["weights"]))
    except FileNotFoundError:
        job = directory / JOB_FILE
        if not job.exists() or read_job(job).get("sft") is None:  # a folder of the user's, or [sft] was removed again
            return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{own / DONE}: {error}; restore it from a copy; --fresh starts anew") from None
    lines = Follower(own / "trainer" / "metrics.jsonl", NEWEST_BYTES).new_lines(lambda: None)
    return FineTuning(max((line["step"] for line in lines), default=0), steps_of(own, RUN_ID), None)
