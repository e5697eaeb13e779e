"""A step's recorded batch in `run_<id>/rollouts/step_N/`, and how long it stays: `batch.bin`, once durable `kept_batch.bin`.

The orchestrator renames a durable batch that stays for branches and checks. So a process that resumes the run knows which
batches a trainer may still ask for.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30

BATCH_FILE = "batch.bin"
"""A batch that the trainer may ask for again."""

KEPT_FILE = "kept_batch.bin"
"""A batch that a checkpoint of the trainer covers, and that `keep_batches` keeps."""


def batch_file(step_directory: Path) -> Path:
    """Returns the file with a step's batch, of whichever name; `batch.bin` if there is none."""
    kept = step_directory / KEPT_FILE
    return kept if kept.exists() else step_directory / BATCH_FILE


@dataclass(frozen=True, slots=True)
class KeptBatches:
    """How many durable batches stay."""

    steps: int = 0
    gib: float | None = None
    """The most that they may take. None: no limit but `steps`."""

    def settle(self, rollouts: Path, first: int, last: int) -> None:
        """Keeps or removes the batches of steps `first` to `last`, which are now durable, and removes kept ones that are too old.

        Blocks. Raises `OSError`.
        """
        for step in range(first, last + 1):
            file = rollouts / f"step_{step}" / BATCH_FILE
            with suppress(FileNotFoundError):
                if self.steps:
                    file.replace(file.with_name(KEPT_FILE))
                else:
                    file.unlink()
        if not self.steps and first > 1:
            return  # the first call has removed what a former process kept
        kept = {int(file.parent.name.removeprefix("step_")): file for file in rollouts.glob(f"step_*/{KEPT_FILE}")}
        taken = 0
        for step in sorted(kept, reverse=True):
            with suppress(FileNotFoundError):  # its step's records may leave at this moment
                taken += kept[step].stat().st_size
                if step <= last - self.steps or (self.gib is not None and taken > self.gib * GIB):
                    kept[step].unlink()
