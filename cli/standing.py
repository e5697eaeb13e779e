"""How far the run in a job's directory has come, as a resume would find it: what is left to do decides what is started."""

from __future__ import annotations

from cli.history import History
from cli.job import JobConfig
from transport.atomic import published_steps


def all_committed(config: JobConfig) -> bool:
    """Whether the orchestrator has committed every step. What is left then is the trainer's, and needs no inference."""
    run = config.orchestrator
    return max(published_steps(run.run_dir / "checkpoints"), default=0) >= run.steps


def is_finished(config: JobConfig) -> bool:
    """Whether nothing is left to do: every step committed, in the metrics, trained and durable, its batch deleted."""
    run = config.orchestrator
    durable = max(published_steps(config.output_dir / "trainer" / run.run_id / "checkpoints"), default=0)
    history = History.of(config.output_dir, run.run_id)
    history.refresh()
    return (
        all_committed(config)
        and durable >= run.steps
        and max(history.shipped, default=0) >= run.steps
        and not any(run.run_dir.glob("rollouts/step_*/batch.bin"))
    )
