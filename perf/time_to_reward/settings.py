"""What both sides of the comparison have in common, and the record that each of them leaves.

`ours.py` turns the settings into a job, `trl_side.py` into a `GRPOConfig`. Each side's record has a line for each batch of
rollouts, with the moment at which its rewards were known, so that what a side does after that (training, logging, saving) is
not counted against it before the next batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.environments.config import EnvironmentConfig
from perf.chaos.disk import json_lines

GROUP_SIZE = 8
"""Rollouts of a group, on all sides."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned, from which model."""

    model: str
    """Name of a model that `counterpoint make-model` knows."""
    environment: str
    """Kind and name of the environment. The order of its examples depends on the name."""
    arguments: Mapping[str, Any]
    """What the environment is constructed with."""
    completion: str
    """The key of a rollout's state with the text of the completion."""
    max_tokens: int
    """The tokens of a completion."""
    learning_rate: float
    thresholds: tuple[float, ...]
    """Mean rewards to be reached."""
    threads: int
    """TRL's threads. Idle threads of OpenMP spin where a model is too small for two. Ours chooses itself."""
    job: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Limits that our job needs for the model, by table."""

    def environment_config(self) -> EnvironmentConfig:
        """Returns the run's only environment."""
        return EnvironmentConfig(name=self.environment, kind=self.environment, args=dict(self.arguments))


_SUMS = Path(__file__).parents[2] / "configs" / "demo-real-sums.jsonl"

TASKS = {
    "words": Task("tiny-dense", "reverse-text", {"examples": 1000}, "answer", 32, 1e-4, (0.7, 0.8, 0.9), 1),
    "sums": Task(
        "smollm2",
        "single-turn",
        {
            "data": {"path": str(_SUMS)},
            "rubric": [
                {"kind": "exact", "name": "right", "weight": 0.7, "extract": r"(\d+)\D*$"},
                {"kind": "exact", "name": "bare", "weight": 0.3},
            ],
        },
        "completion",
        16,
        5e-6,
        (0.3, 0.4, 0.5),
        2,
        {"inference": {"max_num_batched_tokens": 8192}, "trainer": {"max_tokens": 4096}},
    ),
}
"""The tasks by name: a word reversed by a tiny model, and sums by one of 135 million parameters (extra `smollm2`)."""


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
    task_name: str = "words"
    beta1: float = 0.9
    beta2: float = 0.99
    max_grad_norm: float = 1.0

    @property
    def task(self) -> Task:
        """What is learned."""
        return TASKS[self.task_name]

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
    return [BatchRecord(**line) for line in json_lines(file)]


def append_record(file: Path, record: BatchRecord) -> None:
    """Adds a line to the file."""
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(record)) + "\n")
