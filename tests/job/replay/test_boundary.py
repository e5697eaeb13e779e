"""The boundary outside the daemon: what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.job.replay.boundary import Recording, rig
from counterpoint.job.replay.replay import on_daemons_loop
from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts

STEPS = 3


@pytest.mark.slow
def test_a_batch_that_was_delivered_is_kept_neither_on_disk_nor_in_memory(tmp_path: Path) -> None:
    """The consumer reads a batch before its commit, and may acknowledge it only after."""
    shape = Shape(rollouts=24, turns=6, tokens=600, layers=4, top_k=2, experts=8)
    recording = Recording(header_of(shape), list(synthetic_rollouts(shape)))
    run_dir = tmp_path / f"run_{recording.header.run_id}"

    async def take() -> None:
        async with rig(recording, tmp_path) as parts:
            await parts.finalize()
            for step in range(1, STEPS + 1):
                await parts.take(step)
                await parts.deliver(step)
                assert parts.sender.unacknowledged == 0
                assert list(run_dir.glob("rollouts/*/batch.bin")) == []

    on_daemons_loop(take)
    assert len(list(run_dir.glob("rollouts/*/STABLE"))) == STEPS
