"""`make demo-tinker`: a recipe of the Tinker cookbook, unmodified, trains a real language model on `counterpoint tinker`.

The recipe is `math_rl` with its arithmetic: sums of two numbers up to 100. It is a client in a process of its own, with the
cookbook that `make demo-tinker` installs; the job is `configs/demo-tinker.toml`. The exit code is 0 if it learns.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from counterpoint.job.resolve_model import resolve_model
from counterpoint.transport.process.child import Child
from perf.chaos.disk import json_lines
from perf.commands import Command, DemoError, is_ready, log_of, say, until

JOB = Path("configs/demo-tinker.toml")
COOKBOOK = Path("build/cookbook")
RECIPE = "tinker_cookbook.recipes.math_rl.train"

STEPS = 14

VALUES = {
    "env": "arithmetic",
    "renderer_name": "role_colon",
    "groups_per_batch": 16,
    "group_size": 4,
    "loss_fn": "importance_sampling",
    "lora_rank": 8,
    "learning_rate": 3e-4,
    "max_steps": STEPS,
    "save_every": 0,
    "eval_every": 0,
}
"""The recipe's own settings, smaller than its defaults, with a loss and a learning rate that fit the model."""

RIGHT = "env/all/correct"
"""The recipe's metric: the share of right answers in a step."""

ENDS = 3
"""The first and the last steps, of which means are compared."""

LEAST_RISE = 0.15


def main() -> int:
    """Plays the demo. Returns 0 if the share of right answers rises."""
    job = tomllib.loads(JOB.read_text())
    output = Path(job["output_dir"])
    metrics = output.with_name(f"{output.name}-recipe") / "metrics.jsonl"
    shutil.rmtree(metrics.parent, ignore_errors=True)
    began = time.monotonic()
    with Command(log_of(output, "job"), "tinker", str(JOB), *(["--fresh"] if output.exists() else [])) as service:
        say(f"a trainer, a server and the service start: {service.log}")
        until("the service", lambda: is_ready(output), [service])
        say(f"python -m {RECIPE} {' '.join(words := settings(job, metrics.parent))}")
        variables = os.environ | {"PYTHONPATH": str(COOKBOOK), "TINKER_API_KEY": "tml-demo", "HF_HUB_OFFLINE": "1"}
        log = log_of(output, "recipe")
        with Child("the recipe", [sys.executable, "-m", RECIPE, *words], environment=variables, log=log) as recipe:
            told = Told()
            until("the recipe", lambda: recipe.code is not None, [service], lambda: told.tell(metrics))
    if recipe.code:
        raise DemoError(f"the recipe ended with {recipe.code}: see {log}")
    told.tell(metrics)
    first, last = statistics.fmean(told.right[:ENDS]), statistics.fmean(told.right[-ENDS:])
    say(
        f"after {time.monotonic() - began:.0f} s: right answers {first:.2f} (first {ENDS} steps) → {last:.2f} (last {ENDS})"
    )
    return 0 if len(told.right) == STEPS and last - first >= LEAST_RISE else 1


def settings(job: dict[str, object], directory: Path) -> Sequence[str]:
    """Returns the arguments of the recipe, which writes to `directory`."""
    tinker = job["tinker"]
    assert isinstance(tinker, dict)
    values = VALUES | {
        "model_name": resolve_model(str(job["model"])),
        "base_url": f"http://127.0.0.1:{tinker['port']}",
        "log_path": directory,
    }
    return [f"{name}={value}" for name, value in values.items()]


class Told:
    """The share of right answers of each step, said when it is there."""

    def __init__(self) -> None:
        self.right: list[float] = []

    def tell(self, metrics: Path) -> None:
        """Reads the recipe's metrics file, and says what is new."""
        lines = [line for line in json_lines(metrics) if RIGHT in line] if metrics.exists() else []
        for line in lines[len(self.right) :]:
            self.right.append(line[RIGHT])
            say(f"step {len(self.right)}/{STEPS}: right answers {line[RIGHT]:.2f}, {line['time/total']:.0f} s")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoError as error:
        sys.exit(f"demo-tinker: {error}")
