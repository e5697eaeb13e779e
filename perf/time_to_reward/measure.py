"""Runs one side in processes of its own, and says when it had drawn and scored each batch, and what CPU it had taken by then."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.transport.process.child import Child
from perf.noise import CpuTimes
from perf.time_to_reward.cpu_clock import CpuClock
from perf.time_to_reward.ours import job_of, records_of
from perf.time_to_reward.settings import BatchRecord, Settings, Task, read_records

OURS = {"ours": 1, "ours-ahead": 2}
"""Our job, on-policy as TRL is, and one step ahead of the trainer, as it is by default; with `max_lead_steps`."""

SIDES = (*OURS, "trl", "trl-vllm")
"""The sides that are compared: Counterpoint, and TRL with the generation of transformers and with vLLM in its
process."""

SMOOTHING = 5
"""Batches over which the reward is averaged before it is held against a threshold."""

TENTHS = 10

STOP_SECONDS = 60.0


@dataclass(slots=True)
class Outcome:
    """One run of one side."""

    side: str
    seed: int
    began: float
    ended: float
    cpu: float
    """CPU seconds of all its processes, from the command's start to its end."""
    others: float
    """Share of the machine's CPU that other processes took meanwhile."""
    records: list[BatchRecord]
    thresholds: tuple[float, ...]
    cpu_until: Sequence[Mapping[str, float]] = ()
    """CPU seconds when the rewards of each batch were known, by what took them."""

    def tenths(self) -> list[float]:
        """Returns the mean reward of each tenth of the run."""
        rewards = [record.reward for record in self.records]
        bounds = [round(part * len(rewards) / TENTHS) for part in range(TENTHS + 1)]
        return [_mean(rewards[low:high]) for low, high in pairwise(bounds)]

    def reached(self, threshold: float) -> int | None:
        """Returns the first batch (from 0) at which the smoothed reward is at the threshold; None if there is none."""
        rewards = [record.reward for record in self.records]
        for last in range(SMOOTHING - 1, len(rewards)):
            if _mean(rewards[last + 1 - SMOOTHING : last + 1]) >= threshold:
                return last
        return None

    @property
    def start_up(self) -> float:
        """Seconds from the command to the rewards of the first batch."""
        return self.records[0].at - self.began

    @property
    def step(self) -> float:
        """Seconds of one update, from the first batch's rewards to the last one's."""
        return (self.records[-1].at - self.records[0].at) / (len(self.records) - 1)

    @property
    def cpu_step(self) -> dict[str, float]:
        """CPU seconds of one update, by the processes that take them."""
        first, last = self.cpu_until[0], self.cpu_until[-1]
        return {name: (last[name] - first.get(name, 0.0)) / (len(self.records) - 1) for name in last}

    def figures(self) -> dict[str, Any]:
        """Returns the figures by name; those of a threshold that was not reached are None."""
        figures: dict[str, Any] = {
            "side": self.side,
            "seed": self.seed,
            "tenths": self.tenths(),
            "start_up_seconds": self.start_up,
            "step_seconds": self.step,
            "step_cpu_seconds": sum(self.cpu_step.values()),
            "step_cpu_seconds_of": self.cpu_step,
            "wall_seconds": self.ended - self.began,
            "cpu_seconds": self.cpu,
            "rollouts": sum(record.rollouts for record in self.records),
            "others": self.others,
        }
        for threshold in self.thresholds:
            batch = self.reached(threshold)
            figures[f"to_{threshold}"] = {
                "wall_seconds": self.records[batch].at - self.began if batch is not None else None,
                "training_seconds": self.records[batch].at - self.records[0].at if batch is not None else None,
                "cpu_seconds": sum(self.cpu_until[batch].values()) if batch is not None else None,
                "updates": batch + 1 if batch is not None else None,
                "rollouts": sum(each.rollouts for each in self.records[: batch + 1]) if batch is not None else None,
            }
        return figures


def run_side(
    side: str, settings: Settings, directory: Path, load: int | None = None, timeout_seconds: float = 1800.0
) -> Outcome:
    """Runs one side to its end in `directory`, beside what runs below process `load` and is none of its own.

    Raises `RuntimeError`, with the end of its output, if it fails.
    """
    directory.mkdir(parents=True)
    records_file = directory / "records.jsonl"
    command, environment = _command(side, settings, directory, records_file), environment_of(side, settings.task)
    before, began = CpuTimes.now(load), time.time()
    with (
        Child(side, command, environment=environment, log=directory / "output.log") as process,
        CpuClock(load) as clock,
    ):
        try:
            code = process.wait(timeout_seconds)
        finally:
            process.stop(STOP_SECONDS)
    ended, after = time.time(), CpuTimes.now(load)
    records = records_of(directory / "job") if side in OURS else read_records(records_file)
    if code != 0 or len(records) < settings.updates:
        end = "\n".join(process.last_lines(20))
        raise RuntimeError(
            f"{side} ended with {code} after {len(records)} of {settings.updates} updates; the end of {process.log}:\n{end}"
        )
    return Outcome(
        side,
        settings.seed,
        began,
        ended,
        after.ours - before.ours,
        after.share_of_others(before),
        records,
        settings.task.thresholds,
        [clock.at(record.at) for record in records],
    )


def _command(side: str, settings: Settings, directory: Path, records: Path) -> list[str]:
    if side in OURS:
        file = directory / "job.toml"
        file.write_text(tomli_w.dumps(job_of(settings, directory / "job", OURS[side])))
        return [sys.executable, "-m", "counterpoint.cli.main", "run", str(file)]
    if side not in SIDES:
        raise ValueError(f"side {side!r} is none of {', '.join(SIDES)}")
    file = directory / "settings.json"
    file.write_text(json.dumps(settings.to_json()))
    generation = "vllm" if side == "trl-vllm" else "transformers"
    return [sys.executable, "-m", "perf.time_to_reward.trl_side", str(file), str(records), generation]


def environment_of(side: str, task: Task) -> dict[str, str]:
    """Returns the environment of a side."""
    if side in OURS:
        return dict(os.environ)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(task.threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if side == "trl-vllm":  # what our servers set, too (`counterpoint/inference/server.py`)
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment |= {"TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return environment


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
