"""`cluster.channel.exactly_once`: what a consumer knows of its commits."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.cluster.channel.exactly_once import CommitFile, CommittedPositions


def test_positions_survive_as_plain_values_and_stay_small() -> None:
    positions = CommittedPositions()
    positions.begin("batches", "g1")
    for sequence in (0, 1, 5, 7):
        assert positions.add("batches", "g1", sequence)
    assert not positions.add("batches", "g1", 5)
    positions.forget_below("batches", 6)
    assert positions.as_dict() == {"batches": ["g1", 6, [7]]}
    again = CommittedPositions.of_dict(positions.as_dict())
    again.begin("batches", "g1")
    assert [again.contains("batches", sequence) for sequence in (3, 6, 7, 8)] == [True, False, True, False]


def test_another_generation_of_a_channel_means_other_records() -> None:
    positions = CommittedPositions()
    positions.begin("batches", "g1")
    positions.add("batches", "g1", 0)
    positions.begin("batches", "g2")
    assert not positions.add("batches", "g1", 0), "committed late, when the number meant another record already"
    assert not positions.contains("batches", 0)
    assert not positions.contains("unknown", 0)


def test_a_commit_holds_state_and_positions_and_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.commit"
    file = CommitFile(path)
    assert file.state is None
    file.positions.begin("batches", "g1")
    file.positions.add("batches", "g1", 0)
    file.commit({"step": 1, 2: [3]})
    file.positions.add("batches", "g1", 1)  # never committed
    with pytest.raises(OSError, match="another process"):
        CommitFile(path)
    file.close()
    again = CommitFile(path)
    assert again.state == {"step": 1, 2: [3]}
    assert again.positions.contains("batches", 0)
    assert not again.positions.contains("batches", 1)
    again.close()
