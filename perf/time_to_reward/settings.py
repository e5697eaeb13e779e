"""What both sides of the comparison have in common, and the record that each of them leaves.

`ours.py` turns the settings into a job, `trl_side.py` into a `GRPOConfig`. Each side's record has a line for each batch of
rollouts, with the moment at which its rewards were known, so that what a side does after that (training, logging, saving) is
not counted against it before the next batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODEL = "tiny-dense"
"""Name of the built-in model."""

GROUP_SIZE = 8
"""Rollouts of a group, on all sides."""

ENVIRONMENT = "reverse-text"
"""Kind and name of the environment. The order of its words depends on the name."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run of either side."""

    model: str
    """Directory of the model."""
    seed: int = 0
    updates: int = 100
    groups: int = 8
    """Groups of one update."""
    group_size: int = 8
    examples: int = 1000
    """Words of the data set, which its own seed chooses; the run's seed shuffles them."""
    max_tokens: int = 32
    """The tokens of a completion."""
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    max_grad_norm: float = 1.0

    @property
    def rollouts(self) -> int:
        """Rollouts of one update."""
        return self.groups * self.group_size

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The rollouts of one update."""

    at: float
    """Seconds since the epoch at which their rewards were known."""
    reward: float
    """Mean reward of all rollouts that were drawn for it, those without an advantage included."""
    rollouts: int


def read_records(file: Path) -> list[BatchRecord]:
    """Reads what `append_record` wrote; nothing if there is no file."""
    if not file.exists():
        return []
    return [BatchRecord(**json.loads(line)) for line in file.read_text().splitlines() if line.endswith("}")]


def append_record(file: Path, record: BatchRecord) -> None:
    """Adds a line to the file."""
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(record)) + "\n")
