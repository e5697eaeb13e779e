"""What is planned: the trainer and the servers of a job, or of a fine-tuning, which has none."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.job.config import JobConfig
from counterpoint.job.sections import GpuConfig, ServersConfig
from counterpoint.run.config import RunConfig
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.sft.config import SftConfig


@dataclass(frozen=True, slots=True)
class Planned:
    """A configuration, as far as it decides about memory."""

    trainer: TrainerConfig
    runs: list[TrainingConfig]
    """The runs that are trained at once."""
    servers: ServersConfig | None
    """None: none is started."""
    gpus: GpuConfig
    fewest_tokens: int
    """The fewest tokens of a row on one rank: a smaller `trainer.max_tokens` is refused."""
    longest_completion: int
    """Tokens that a server generates in one answer."""
    adapter: tuple[str, str]
    """The key of an adapter, and the sections that it needs."""
    kept_checkpoints: int
    """Checkpoints of all runs that stay by `training.keep_every`, once all steps are trained."""
    kept_batches: list[tuple[int, float | None]]
    """The most tokens of the batches that a run keeps, and its `keep_batches_gib`, for each run that keeps some."""

    @property
    def server_gpus(self) -> int:
        """GPUs of all servers, each on its own."""
        return 0 if self.servers is None else self.servers.replicas * self.servers.tensor_parallel_size

    @property
    def servers_a_gpu(self) -> int:
        """Servers on one GPU: without `[gpus]` all are on the first ones."""
        if self.servers is None:
            return 0
        return self.servers.replicas if self.gpus.inference is None else 1


def planned_job(job: JobConfig) -> Planned:
    """Returns what is planned of a job: of its runs those with the largest adapters, if not all are trained at once."""
    every = [run.training for run in job.every_run] or [job.orchestrator.training]
    runs = sorted(every, key=lambda run: run.lora.rank if run.lora is not None else 0, reverse=True)
    if job.stay:
        runs += [runs[0]] * (job.trainer.max_runs - len(runs))  # a guest is like the job's own run
    return Planned(
        trainer=job.trainer if job.backend == "local" else _off_if_unset(job.trainer),
        runs=runs[: job.trainer.max_runs],
        servers=job.inference if job.inference.replicas else None,
        gpus=job.gpus,
        fewest_tokens=-(-job.inference.max_model_len // job.trainer.context_parallel),
        longest_completion=max((run.longest_completion for run in job.every_run), default=0),
        adapter=("orchestrator.training.lora", "[orchestrator.training.lora] and [inference.lora]"),
        kept_checkpoints=sum(run.steps // (run.training.keep_every or run.steps + 1) for run in job.every_run),
        kept_batches=[
            (_kept_steps(run) * run.schedule.rollouts_per_step * job.inference.max_model_len, run.keep_batches_gib)
            for run in job.every_run
            if run.keep_batches
        ],
    )


def planned_sft(config: SftConfig) -> Planned:
    """Returns what is planned of a fine-tuning. Longer conversations than a row may be cut, unless `max_length` is set."""
    trainer = _off_if_unset(config.of_trainer)
    return Planned(
        trainer=trainer,
        runs=[config.training],
        servers=None,
        gpus=GpuConfig(),
        fewest_tokens=-(-(config.max_length or 1) // trainer.context_parallel),
        longest_completion=0,
        adapter=("training.lora", "[training.lora]"),
        kept_checkpoints=0,  # how many steps an epoch has is known once the data is read
        kept_batches=[],
    )


def _kept_steps(run: RunConfig) -> int:
    return min(run.keep_batches, run.keep_rollouts, run.steps)


def _off_if_unset(trainer: TrainerConfig) -> TrainerConfig:
    """Returns a trainer for which no layers are chosen at its start."""
    return trainer.model_copy(update={"activation_checkpointing": trainer.activation_checkpointing or False})
