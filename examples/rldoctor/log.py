"""Writes a run's metrics as a log that rldoctor diagnoses: the names that it knows, those of TRL, one JSON object a step.

    python -m examples.rldoctor.log outputs/demo demo > demo-log.jsonl
    pip install rldoctor && rl-doctor diagnose demo-log.jsonl

A check of drift needs `training.reference`, and one of the reward's parts a rubric: without these, rldoctor skips it.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "reward/min": "reward_min",
    "reward/max": "reward_max",
    "groups/no_difference": "frac_reward_zero_std",
    "length/mean": "completions/mean_length",
    "length/cut": "completions/clipped_ratio",
    "wall_seconds": "step_time",
    "reference_kl": "kl",
    "masked_share": "clip_ratio",
    **{name: name for name in ("entropy", "grad_norm", "learning_rate", "loss", "tokens_per_second")},
}
"""Our names, of orchestrator and trainer, and the ones that rldoctor takes."""


def log_of(job: Path, run: str) -> Iterator[dict[str, Any]]:
    """Yields the configuration and then the steps. The first result of an evaluation is the held-out score."""
    config = tomllib.loads((job / f"run_{run}" / "control" / "orch.toml").read_text())
    size = config.get("schedule", {}).get("group_size")
    yield {"config": {"algorithm": "grpo", "num_generations": size, "max_steps": config["steps"]}}
    trained = {line["step"]: line for line in _lines(job / "trainer" / "metrics.jsonl") if line.get("run_id") == run}
    for line in _lines(job / f"run_{run}" / "metrics.jsonl"):
        both = trained.get(line["step"], {}) | line
        found = {NAMES[name]: value for name, value in both.items() if name in NAMES}
        for name, value in both.items():
            match name.split("/"):
                case ["environment", of, part, "mean"] if part != "total" and f"environment/{of}/total/mean" in both:
                    found[f"rewards/{of}.{part}/mean"] = value
                case ["evaluation", *_] if f"{name}/low" in both:
                    found.setdefault("eval_score", value)
        yield {"step": line["step"], **found}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


if __name__ == "__main__":
    for each in log_of(Path(sys.argv[1]), sys.argv[2]):
        sys.stdout.write(json.dumps(each) + "\n")
