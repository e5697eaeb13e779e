"""A run that a trainer in a process of its own has trained over the real wire, with the batches that its orchestrator keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoint.job.configuration.load import to_toml
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport import codec
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.messages import Acknowledged, Ready
from counterpoint.transport.records import Batch
from tests.support.polling import DEADLINE_SECONDS, until
from tests.trainer.conftest import make_batch, make_run_config
from tests.trainer.orchestrator_end import ended, feeder, log_path, trainer_process, write_run

STEPS = 5
LENGTHS = (9, 17, 5, 12, 30, 25)


def keep_batch(output_dir: Path, batch: Batch) -> None:
    """Writes `batch.bin`, as an orchestrator does."""
    with publish_directory(output_dir / f"run_{batch.run_id}" / "rollouts" / f"step_{batch.step}") as directory:
        codec.write_file(directory / "batch.bin", batch)


async def record(
    output_dir: Path,
    model: Path,
    trainer: dict[str, Any] | None = None,
    make: Callable[[int], Batch] = lambda step: make_batch(step, LENGTHS),
    **training: Any,
) -> TrainerConfig:
    """Trains a run of `STEPS` steps to its end, with checkpoints of steps 2 and 4 and the end's; returns the trainer's file.

    `make` is called once the weights before its step are published. A step has several rows.
    """
    write_run(make_run_config(output_dir, model, steps=STEPS, **training))
    given = {"threads": 1, "max_tokens": 48, "keep_checkpoints": 3} | (trainer or {})
    config = TrainerConfig(output_dir=output_dir, model=str(model), **given)
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready, next_step=1)
            for step in range(1, STEPS + 1):
                published = output_dir / "run_default" / "broadcast" / f"step_{step - 1}" / "STABLE"
                await until(published.exists, "the weights before the step", DEADLINE_SECONDS)
                keep_batch(output_dir, batch := make(step))
                await end.train(batch)
            await end.until(Acknowledged, step=STEPS, durable=STEPS)
        assert await ended(process) == 0, log_path(config).read_text()
    (output_dir / "roles").mkdir()
    (output_dir / "roles" / "trainer.toml").write_text(to_toml(config))
    return config
