"""Batches stay on the disk as long as `keep_batches` and `keep_batches_gib` say, and checkpoints that are kept stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.run.batch_files import BATCH_FILE, GIB, KEPT_FILE, KeptBatches
from counterpoint.run.trained import TrainingConfig
from counterpoint.transport.files.atomic import prune_steps, publish_directory, published_steps


def write(rollouts: Path, steps: range, size: int = 100) -> None:
    for step in steps:
        with publish_directory(rollouts / f"step_{step}", durable=False) as directory:
            (directory / BATCH_FILE).write_bytes(bytes(size))


def left(rollouts: Path, name: str = KEPT_FILE) -> list[int]:
    return [step for step in published_steps(rollouts) if (rollouts / f"step_{step}" / name).exists()]


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (KeptBatches(), []),
        (KeptBatches(3), [6, 7, 8]),
        (KeptBatches(100), [1, 2, 3, 4, 5, 6, 7, 8]),
        (KeptBatches(100, 250 / GIB), [7, 8]),
        (KeptBatches(100, 1 / GIB), []),
    ],
)
def test_the_newest_durable_batches_stay_and_those_not_durable_anyway(
    tmp_path: Path, kept: KeptBatches, expected: list[int]
) -> None:
    write(tmp_path, range(1, 11))
    kept.settle(tmp_path, 1, 4)
    kept.settle(tmp_path, 5, 8)
    assert left(tmp_path) == expected
    assert left(tmp_path, BATCH_FILE) == [9, 10]


@pytest.mark.parametrize("steps", [0, 2])
def test_batches_that_a_former_process_kept_leave_once_they_are_too_many(tmp_path: Path, steps: int) -> None:
    write(tmp_path, range(1, 11))
    KeptBatches(100).settle(tmp_path, 1, 8)
    KeptBatches(steps).settle(tmp_path, 1, 9)
    assert left(tmp_path) == [8, 9][:steps]


def test_checkpoints_of_multiples_stay(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    prune_steps(tmp_path, 2, 4)
    assert published_steps(tmp_path) == [4, 8, 9, 10]
    training = TrainingConfig(checkpoint_interval=10, keep_every=4)
    assert [step for step in range(1, 13) if training.has_checkpoint(step)] == [4, 8, 10, 12]
