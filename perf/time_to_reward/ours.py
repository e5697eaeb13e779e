"""Our side: the settings as a job for `counterpoint run`, and the records in what the job leaves.

The job states what is being learned, and that its run ships what it draws, as TRL does, with two updates' rollouts in flight.
What it leaves out are our defaults, which the comparison measures, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.job.evaluation.server import free_port
from perf.chaos.disk import json_lines
from perf.time_to_reward.settings import BatchRecord, Settings


def job_of(settings: Settings, directory: Path, lead: int = 1) -> dict[str, Any]:
    """Returns the job's file. Its run ships what it draws, as TRL does, and is on-policy with a `lead` of 1."""
    port, task = free_port("127.0.0.1", 0), settings.task
    inference = {"port": port, "dtype": "float32", "max_model_len": 256, "max_num_seqs": settings.rollouts}
    return {
        "output_dir": str(directory),
        "model": settings.model,
        "seed": settings.seed,
        "inference": inference | dict(task.job.get("inference", {})),
        "trainer": {"device": "cpu", "dtype": "float32"} | dict(task.job.get("trainer", {})),
        "orchestrator": {
            "steps": settings.updates,
            "environments": [
                {"name": task.environment, "kind": task.environment, "args": dict(task.arguments)},
            ],
            "sampling": {"temperature": 1.0, "max_tokens": task.max_tokens},
            "schedule": {
                "group_size": settings.group_size,
                "rollouts_per_step": settings.rollouts,
                "max_inflight_rollouts": 2 * settings.rollouts,
                "max_lead_steps": lead,
                "on_filtered": "ship",
            },
            "training": {
                "learning_rate": task.learning_rate,
                "betas": [settings.beta1, settings.beta2],
                "max_grad_norm": settings.max_grad_norm,
            },
        },
    }


def records_of(directory: Path) -> list[BatchRecord]:
    """Returns the records of a job's only run; none if it did not begin."""
    lines = json_lines(directory / "run_default" / "metrics.jsonl")
    return [BatchRecord(line["time"], line["reward/mean"], line["rollouts/completed"]) for line in lines]
