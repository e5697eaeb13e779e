"""A job's roles as workers: what each is called, which file and which command it is started with, and the rules of its life."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from cluster.events import Worker
from job.check import SAFE_PATH
from job.config import JobConfig
from job.directory import living_runs
from job.run_state import all_committed, is_finished
from run.config import RunConfig
from transport.config import Config

COMPUTE_NICE = 10
"""vLLM and the trainer yield the CPU to the orchestrators, whose loops must answer at once and need little; between the two of
them nothing changes."""

SILENCE_SECONDS = 60.0
"""Silence after which an orchestrator, whose event loop sends the heartbeats, or a server's keeper counts as stuck."""

TRAINER_SILENCE_SECONDS = 300.0
"""The same for a trainer. A thread sends its heartbeats, since a step may take longer, but a single call may block this thread,
too, such as one that writes a large checkpoint to a slow disk."""


def worker_of(config: JobConfig, run: RunConfig) -> str:
    """The name of a run's worker."""
    return f"orchestrator_{run.run_id}" if config.runs else "orchestrator"


def sections_of(config: JobConfig) -> dict[str, Config]:
    """The configuration of each worker, by its name."""
    servers = {f"inference_{position}": config.server(position) for position in range(config.inference.replicas)}
    return {**servers, "trainer": config.trainer, **{worker_of(config, run): run for run in config.every_run}}


def needs_servers(config: JobConfig) -> bool:
    """Whether anything is left to generate, or may come: by a guest that waits for the job's return, or that has yet to join."""
    if config.stay or not config.resume or living_runs(config.output_dir):
        return True
    return not all(map(all_committed, config.every_run))


def workers_of(config: JobConfig, files: dict[str, Path]) -> list[Worker]:
    """The roles, in the order in which they start; they stop in its reverse, so that the orchestrators can still drain. What a
    resume finds finished is not started: no run that is done, and inference only where something is left to generate, or may
    come."""
    runs = [run for run in config.every_run if not (config.resume and is_finished(run))]
    return (
        (_servers(config, files) if needs_servers(config) else [])
        + [
            Worker(
                "trainer",
                _command("trainer", files["trainer"]),
                config.output_dir / "trainer" / "trainer.log",
                ready_timeout_seconds=600,
                silence_timeout_seconds=TRAINER_SILENCE_SECONDS,
                stop_timeout_seconds=120,
                nice=COMPUTE_NICE,
                environment=_environment(config.gpus.trainer),
                max_restarts=config.max_restarts,
                restart_arguments=("--resume",),
            )
        ]
        + [_orchestrator(config, run, files) for run in runs]
    )


def _servers(config: JobConfig, files: dict[str, Path]) -> list[Worker]:
    each, gpus = config.inference.tensor_parallel_size, config.gpus.inference
    return [
        Worker(
            f"inference_{position}",
            _command("inference", files[f"inference_{position}"]),
            config.output_dir / f"inference_{position}.log",
            ready_timeout_seconds=config.inference.startup_timeout_seconds + 60,
            silence_timeout_seconds=SILENCE_SECONDS,
            nice=COMPUTE_NICE,
            environment=_environment(gpus and gpus[position * each : (position + 1) * each]),
            max_restarts=config.max_restarts,
        )
        for position in range(config.inference.replicas)
    ]


def _orchestrator(config: JobConfig, run: RunConfig, files: dict[str, Path]) -> Worker:
    name = worker_of(config, run)
    return Worker(
        name,
        _command("orchestrator", files[name]),
        config.output_dir / f"{name}.log",
        task=True,
        after=("trainer",),
        ready_timeout_seconds=math.inf,  # it has a deadline for all it waits for, but one: its turn at the trainer
        silence_timeout_seconds=SILENCE_SECONDS,
        stop_timeout_seconds=run.shutdown_timeout_seconds + 15,
        environment=_environment(None),
        max_restarts=config.max_restarts,
        restart_arguments=("--resume",),
    )


def _command(role: str, file: Path) -> list[str]:
    return [sys.executable, "-m", "cli.main", role, str(file)]


def _environment(gpus: list[int] | None) -> dict[str, str]:
    """What a role's environment has besides ours, and what it starts inherits."""
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    return SAFE_PATH | visible
