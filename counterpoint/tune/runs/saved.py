"""The checkpoint of a trial that is a run: a durable step in the trainer, named by a small file in the checkpoint's directory.

The trainer keeps a saved step until it is forgotten, which happens once the runner has removed the checkpoint's directory.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from counterpoint.job.population.exploit import durable_steps, forget_saved
from counterpoint.run.trainer_files import saved_directory
from counterpoint.transport.files.atomic import published_steps, write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.tune.errors import TuneError

FILE = "run.json"
MAX_BYTES = 2**16


@dataclass(frozen=True)
class SavedStep:
    """Which step of which run a checkpoint is."""

    job: str
    """The directory of the job."""
    run_id: str
    step: int
    iteration: int | None = None
    """The iteration of the step's result, which may be after that of the result at which it was asked for: the run does not wait.
    None in checkpoints of a former version."""


def write_saved(path: Path, saved: SavedStep) -> None:
    """Makes a checkpoint's directory. Raises `OSError`."""
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / FILE, orjson.dumps(asdict(saved)))


def read_saved(path: str) -> SavedStep:
    """Returns what a checkpoint's directory names. Raises `TuneError` for one that is gone or damaged."""
    try:
        return SavedStep(**read_json(Path(path) / FILE, MAX_BYTES))
    except (OSError, UntrustedFileError, TypeError) as error:
        raise TuneError(f"{path} is no checkpoint of a run: {error}") from None


def forget_unnamed(saved: SavedStep, checkpoints: Path) -> None:
    """Lets the trainer remove the saved steps of a run that no checkpoint below this directory names. Raises `OSError`."""
    named = {saved.step}
    for file in checkpoints.glob(f"*/{FILE}"):
        with suppress(TuneError):
            named.add(read_saved(str(file.parent)).step)
    job = Path(saved.job)
    for step in published_steps(saved_directory(job, saved.run_id)):
        if step not in named:
            forget_saved(job, saved.run_id, step)


def newest_durable(job: Path, run_id: str) -> int:
    """Returns the newest step that the trainer has on disk; 0 for none."""
    return max(durable_steps(job, run_id), default=0)
