"""What is read of a branch: rewards of held-out examples, once each, and the tokens of its own steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from counterpoint.job.trial.decisions import HeldOut
from counterpoint.job.trial.measure import BranchReader, fair_interval
from counterpoint.job.trial.record import TrialRecord
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.appended_lines import LONGEST_LINE
from counterpoint.transport.files.json_lines import append_line, append_lines

FIRST = 2


def evaluated(run_dir: Path, step: int, rewards: list[tuple[int, float | None]], **more: Any) -> None:
    records = [
        {
            "environment": "sums",
            "example_index": index,
            "reward": reward,
            "error": None if reward is not None else "died",
        }
        for index, reward in rewards
    ]
    directory = run_dir / "evaluations" / "held" / f"step_{step}"
    directory.mkdir(parents=True)
    append_lines(directory / "rollouts.jsonl", records)
    line = {"evaluation": "held", "step": step, "reward_bounds": [0, 2], "success": 1.0, "tokens/prompt": 10}
    append_line(run_dir / "evaluations.jsonl", line | {"tokens/completion": 30} | more)


def test_a_branch_is_read_once_with_its_own_tokens(tmp_path: Path) -> None:
    steps = [{"step": step, "tokens/prompt": 5, "tokens/completion": 15} for step in range(1, 6)]
    append_lines(tmp_path / "metrics.jsonl", steps)
    reader = BranchReader(tmp_path, "with", "held", FIRST, newest=0)
    assert reader.read()
    assert not reader.read()
    assert list(reader.new()) == []
    evaluated(tmp_path, FIRST, [(4, 1.0)])
    evaluated(tmp_path, 4, [(4, 1.5), (4, 0.5), (7, 2.0), (7, None)])
    append_line(tmp_path / "evaluations.jsonl", {"evaluation": "held", "step": 5, "error": "no server"})
    append_line(tmp_path / "evaluations.jsonl", {"evaluation": "other", "step": 5})
    assert reader.read()
    found = [
        HeldOut("with", FIRST, 40, {("sums", 4): 1.0}, (0, 2)),
        HeldOut("with", 4, 40 + 2 * 20 + 40, {("sums", 4): 1.0, ("sums", 7): None}, (0, 2)),
    ]
    assert list(reader.new()) == found
    assert reader.spent() == 40 + 3 * 20 + 40
    append_line(tmp_path / "metrics.jsonl", {"step": 6, "tokens/prompt": 7})
    assert reader.read()
    assert reader.spent() == 40 + 3 * 20 + 40 + 7
    assert list(reader.new()) == []
    later = BranchReader(tmp_path, "with", "held", FIRST, newest=FIRST)
    later.read()
    assert list(later.new()) == found[1:]
    assert fair_interval(tmp_path, "held") == 4
    assert fair_interval(tmp_path, "absent") is None

    record = TrialRecord(tmp_path, "try")
    record.directory.mkdir(parents=True)
    for each in found:
        record.add(each)
    assert list(record.measurements()) == found


def test_rewards_without_bounds_are_successes(tmp_path: Path) -> None:
    evaluated(tmp_path, 4, [(4, 17.0), (7, 0.5)], reward_bounds=None)
    reader = BranchReader(tmp_path, "without", "held", FIRST, newest=0)
    reader.read()
    (found,) = reader.new()
    assert (found.rewards, found.bounds) == ({("sums", 4): 1.0, ("sums", 7): 0.0}, (0.0, 1.0))


@pytest.mark.parametrize("name", ["evaluations.jsonl", "metrics.jsonl"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name} is a FIFO"):
        fair_interval(tmp_path, "held")
    with pytest.raises(UserError, match=rf"{name} is a FIFO"):
        BranchReader(tmp_path, "with", "held", FIRST, newest=0).read()


def test_an_interval_is_of_sound_lines_alone(tmp_path: Path) -> None:
    """A guest's lines may be endless, or have anything for a number."""
    evaluated(tmp_path, 4, [(4, 1.0)])
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(b'{"step": 1, "tokens/completion": 1, "filler": "' + b"x" * LONGEST_LINE + b'"}\n')
    steps: list[dict[str, Any]] = [{"step": 2, "tokens/completion": 1e300}, {"step": 3, "tokens/prompt": -5}]
    append_lines(tmp_path / "metrics.jsonl", [*steps, {"step": 4, "tokens/prompt": 60}])
    assert fair_interval(tmp_path, "held") == 4
