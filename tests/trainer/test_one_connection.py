"""Three runs of one real trainer by one connection: what befalls one of them, or the trainer, costs and repeats no step."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from counterpoint.transport.messages import Acknowledged, Commit, Evicted, Offer, Ready
from counterpoint.transport.wires.open import open_connection
from tests.support.batches import with_changes
from tests.trainer.conftest import make_batch
from tests.trainer.orchestrator_end import Feeder, ended, feeder, log_path, metrics_lines, send_signal, trainer_process
from tests.trainer.test_train_many import configure, trainer

pytestmark = pytest.mark.slow

RUNS = ("one", "two", "three")
STEPS = 6


async def train_up_to(end: Feeder, run_id: str, step: int) -> None:
    """Sends what the trainer lacks up to a step."""
    await end.until(Ready)
    assert end.ready is not None
    await train(end, run_id, end.ready.next_step, step)


async def train(end: Feeder, run_id: str, first: int, last: int) -> None:
    for step in range(first, last + 1):
        await end.train(make_batch(step, run_id=run_id))
    if last == STEPS:
        await end.until(Acknowledged, durable=last)


async def test_three_runs_by_one_connection_train_each_step_once(dense_directory: Path, tmp_path: Path) -> None:
    """Through a killed trainer, the take-over of one of them from elsewhere, the eviction of one, and the end of one."""
    config = trainer(tmp_path, dense_directory, 3)
    for run_id in RUNS:
        configure(tmp_path, dense_directory, run_id, steps=STEPS, checkpoint_interval=1)
    shared = open_connection(config.transport, config.output_dir)
    async with AsyncExitStack() as stack:
        ends = {
            run_id: await stack.enter_async_context(feeder(config, run_id, shared.link(), epoch=1)) for run_id in RUNS
        }
        with trainer_process(config) as process:
            for run_id, end in ends.items():
                await train_up_to(end, run_id, 1)
            for run_id, end in ends.items():
                await end.send(make_batch(2, run_id=run_id))
            await ends["two"].until(Acknowledged, step=2)
            send_signal(process, signal.SIGKILL)
            assert await ended(process) == -signal.SIGKILL
        with trainer_process(config.model_copy(update={"resume": True})) as process:
            for run_id, end in ends.items():
                await train_up_to(end, run_id, 3)
            async with feeder(config, "two", epoch=2) as elsewhere:
                await train_up_to(elsewhere, "two", 4)
                ready = ends["two"].ready
                assert ready is not None
                await ends["two"].link.send(Commit(4, ready.session))
                evicted = await ends["two"].until(Evicted)
                assert isinstance(evicted, Evicted)
                assert "taken over by holder of epoch 2" in evicted.reason
                ready = ends["three"].ready
                assert ready is not None
                nonsense = make_batch(4, run_id="three")
                nonsense = with_changes(nonsense, advantages_T=np.full_like(nonsense.advantages_T, np.nan))
                await ends["three"].link.send(Offer(nonsense, ready.session))
                evicted = await ends["three"].until(Evicted)
                assert isinstance(evicted, Evicted)
                assert "advantages_T is nan" in evicted.reason
                await ends["three"].link.close()
                await train(ends["one"], "one", 4, STEPS)
                await train(elsewhere, "two", 5, STEPS)
            await ends["one"].link.close()
            assert await ended(process) == 0, log_path(config).read_text()
    steps = {run_id: [line["step"] for line in metrics_lines(tmp_path) if line["run_id"] == run_id] for run_id in RUNS}
    assert steps == {"one": [*range(1, STEPS + 1)], "two": [*range(1, STEPS + 1)], "three": [1, 2, 3]}
