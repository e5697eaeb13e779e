"""Where a trainer keeps a run's durable steps, for all who look for them: the directories below `trainer/<run>/`."""

from __future__ import annotations

from pathlib import Path


def checkpoints_directory(output_dir: Path, run_id: str) -> Path:
    """Returns the directory of the trainer's checkpoints of a run."""
    return output_dir / "trainer" / run_id / "checkpoints"


def saved_directory(output_dir: Path, run_id: str) -> Path:
    """Returns the directory of the checkpoints of a run that are kept until their asker removes them."""
    return output_dir / "trainer" / run_id / "saved"


def start_directory(output_dir: Path, run_id: str) -> Path:
    """Returns the directory of the adapter that a run has begun with."""
    return output_dir / "trainer" / run_id / "start"
