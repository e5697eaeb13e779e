"""Made-up dumps: reproducible, trainable where they say so, as uneven as production's, and never whole in memory."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts
from counterpoint.orchestrator.rollouts.dump import open_dump, write_dump
from counterpoint.orchestrator.rollouts.trajectories import OpenBranches, merge_rollout
from counterpoint.orchestrator.step.finalize import find_fault
from counterpoint.transport.records import Rollout

SMALL = Shape(rollouts=120, turns=24, tokens=1500, layers=3, top_k=4, experts=16)


def dumped(directory: Path, shape: Shape) -> bytes:
    write_dump(directory, header_of(shape), synthetic_rollouts(shape))
    return (directory / "rollouts.bin").read_bytes()


def branches_of(rollout: Rollout) -> list[int]:
    """Which branch each turn extends or opens."""
    branches = OpenBranches()
    extended = [branches.add(turn) for turn in rollout.turns]
    return [next(index for index, known in enumerate(branches.branches) if known is branch) for branch in extended]


def test_a_seed_gives_one_dump(tmp_path: Path) -> None:
    shape = Shape(rollouts=10, turns=5, tokens=200, layers=2, top_k=2, experts=8)
    one = dumped(tmp_path / "one", shape)
    assert one == dumped(tmp_path / "same", shape)
    assert one != dumped(tmp_path / "other", Shape(**(vars(shape) | {"seed": 1})))


@pytest.mark.parametrize("tokens", [640, 645, 32])
def test_even_rollouts_are_all_alike(tokens: int) -> None:
    shape = Shape(rollouts=6, turns=16, tokens=tokens, layers=2, top_k=2, experts=8, group_size=3, even=True)
    rollouts = list(synthetic_rollouts(shape))
    assert [rollout.rollout_id for rollout in rollouts] == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    for rollout in rollouts:
        (sample,) = merge_rollout(rollout)
        assert (len(rollout.turns), len(sample.token_ids_T)) == (16, tokens)
        assert (rollout.error, rollout.filtered_by) == (None, None)


def test_what_is_not_failed_can_be_trained_on() -> None:
    rollouts = list(synthetic_rollouts(SMALL))
    completed = [rollout for rollout in rollouts if rollout.error is None]
    for rollout in completed:
        assert find_fault(rollout) is None
        samples = merge_rollout(rollout)
        rows = sum(len(turn.routed_experts) for turn in rollout.turns if turn.routed_experts is not None)
        assert rows == sum(len(sample.token_ids_T) - 1 for sample in samples), "no row is sent twice"
    trained = [rollout for rollout in completed if rollout.filtered_by is None]
    assert len(trained) > 0.9 * len(completed)
    assert all(abs(rollout.advantage) > 0 for rollout in trained)


def test_rollouts_are_as_uneven_as_in_production() -> None:
    rollouts = list(synthetic_rollouts(SMALL))
    assert len(rollouts) == SMALL.rollouts
    turns = sorted(len(rollout.turns) for rollout in rollouts)
    assert turns[-1] == SMALL.turns
    assert turns[len(turns) // 2] < 0.5 * SMALL.turns
    tokens = [sum(len(sample.token_ids_T) for sample in merge_rollout(rollout)) for rollout in rollouts]
    assert max(tokens) == SMALL.tokens

    failed = [rollout for rollout in rollouts if rollout.error is not None]
    assert 0 < len(failed) < 0.2 * len(rollouts)
    assert all(rollout.reward is None and "TimeoutError" in (rollout.error or "") for rollout in failed)
    sizes = np.bincount([rollout.group_id for rollout in rollouts])
    assert sizes.max() == SMALL.group_size
    assert 0 < np.count_nonzero(sizes < SMALL.group_size) < 0.5 * len(sizes)

    orders = [branches_of(rollout) for rollout in rollouts if rollout.turns]
    interleaved = [order for order in orders if order != sorted(order)]
    rewritten = [order for order in orders if order == sorted(order) and max(order) > 0]
    assert interleaved
    assert rewritten


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16), (300, np.uint16)])
def test_routing_names_different_experts_that_exist(experts: int, dtype: type) -> None:
    shape = Shape(rollouts=2, turns=6, tokens=600, layers=3, top_k=8, experts=experts, even=True)
    turns = [turn for rollout in synthetic_rollouts(shape) for turn in rollout.turns]
    chunks = [turn.routed_experts for turn in turns if turn.routed_experts is not None]
    assert len(chunks) == len(turns)
    for chunk in chunks:
        assert chunk.dtype == dtype
        assert chunk.shape[1:] == (3, 8)
        ordered = np.sort(chunk.astype(np.int32), axis=-1)
        assert np.diff(ordered).min() > 0
    assert max(int(chunk.max()) for chunk in chunks) == experts - 1
    assert len({chunk[:50].tobytes() for chunk in chunks}) == len(chunks)


@pytest.mark.slow
def test_a_dump_is_never_whole_in_memory(tmp_path: Path) -> None:
    shape = Shape(rollouts=240, turns=4, tokens=2000, layers=12, top_k=8, even=True)
    tracemalloc.start()
    try:
        header = write_dump(tmp_path / "dump", header_of(shape), synthetic_rollouts(shape))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.1 * sum(header.files.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollouts": 0}, "rollouts = 0; expected at least 1"),
        ({"turns": -1}, "turns = -1; expected at least 1"),
        ({"top_k": 9, "experts": 8}, "experts = 8; expected at least top_k = 9"),
        ({"experts": 2**16 + 1}, "at most 65536"),
        ({"turns": 78, "tokens": 155}, "tokens = 155; expected at least two for each of turns = 78"),
        ({"seed": -1}, "seed = -1"),
        ({"tokens": 10**9}, "one rollout's routing would take 358 GiB; expected at most 4"),
    ],
)
def test_a_shape_that_cannot_be_made_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Shape(**changes)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    def synthesize(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "counterpoint.cli.main", "synthesize", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    out = tmp_path / "deeper" / "dump"
    small = ("--rollouts", "12", "--turns", "3", "--tokens", "90", "--layers", "2", "--top-k", "2", "--experts", "4")
    completed = synthesize(*small, str(out))
    assert completed.returncode == 0, completed.stderr
    dump = open_dump(out)
    assert f"{out}: 12 rollouts, {dump.header.turns} turns, " in completed.stdout
    assert len(dump.rollouts()) == 12

    again = synthesize(*small, str(out))
    assert (again.returncode, again.stderr) == (
        2,
        f"counterpoint: error: {out} exists; choose another place, or remove it\n",
    )
    wrong = synthesize("--experts", "4", str(tmp_path / "other"))
    assert wrong.returncode == 2
    assert "synthesize: experts = 4; expected at least top_k = 8" in wrong.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "deeper"]
