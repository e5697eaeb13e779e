"""Many runs in one real trainer over the real wire: they come, wait, go and fail without the others noticing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.conftest import make_batch, make_run_config
from tests.trainer.orchestrator_end import Feeder, ended, feeder, log_path, metrics_lines, trainer_process, write_run
from trainer.config import TrainerConfig
from transport.messages import Acknowledged, Ready

pytestmark = pytest.mark.slow


def configure(output_dir: Path, model: Path, run_id: str, **training: Any) -> None:
    """A run's directory, with an adapter to be trained."""
    config = make_run_config(output_dir, model, **{"lora": {"rank": 2}, **training})
    write_run(config.model_copy(update={"run_id": run_id}))


def trainer(output_dir: Path, model: Path, max_runs: int, **more: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "output_dir": output_dir,
            "model": str(model),
            "threads": 1,
            "max_runs": max_runs,
            "max_tokens": 64,
            "keep_broadcasts": 9,
            **more,
        }
    )


def adapter(output_dir: Path, run_id: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(output_dir / f"run_{run_id}" / "broadcast" / f"step_{step}" / "adapter_model.safetensors")


async def train_to_the_end(end: Feeder, run_id: str, steps: int) -> None:
    await end.until(Ready)
    assert end.ready is not None
    for step in range(end.ready.next_step, steps + 1):
        await end.train(make_batch(step, run_id=run_id))
    await end.until(Acknowledged, durable=steps)


async def test_two_runs_train_side_by_side_as_each_would_alone(dense_directory: Path, tmp_path: Path) -> None:
    # AdamW divides by the gradient's size: where that is near zero, the order of a sum moves a weight by a share of the rate.
    rates = {"one": 3e-4, "two": 1e-3}
    for run_id, rate in rates.items():
        alone = tmp_path / run_id
        configure(alone, dense_directory, run_id, learning_rate=rate)
        with trainer_process(trainer(alone, dense_directory, 1)) as process:
            async with feeder(trainer(alone, dense_directory, 1), run_id) as end:
                await train_to_the_end(end, run_id, 4)
            assert await ended(process) == 0
    together = tmp_path / "together"
    config = trainer(together, dense_directory, 2)
    for run_id, rate in rates.items():
        configure(together, dense_directory, run_id, learning_rate=rate)
    with trainer_process(config) as process:
        async with feeder(config, "one") as one, feeder(config, "two") as two, asyncio.TaskGroup() as tasks:
            tasks.create_task(train_to_the_end(one, "one", 4))
            tasks.create_task(train_to_the_end(two, "two", 4))
        assert await ended(process) == 0, log_path(config).read_text()
    lines = metrics_lines(together)
    for run_id in rates:
        assert [line["step"] for line in lines if line["run_id"] == run_id] == [1, 2, 3, 4]
        for step in (0, 4):
            expected, found = adapter(tmp_path / run_id, run_id, step), adapter(together, run_id, step)
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)
    assert any(not torch.equal(adapter(together, "one", 4)[name], tensor) for name, tensor in found.items())
