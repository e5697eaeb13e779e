"""Compares our job with TRL's GRPO: the reward by tenths of the run, and what three rewards take.

    python -m perf.time_to_reward [--task words|sums] [--seeds 0 1 2] [--updates 100] [--rollouts 64] [--sides SIDE...] [--busy]
        [--full] [--json FILE]

Model, data and hyperparameters are those of `settings.py`. The sides take turns, in another order each round, so that a noisy
machine hurts them alike; ratios are of the two runs of a round. With `--busy` each side of a
round runs again while other processes take half of the machine (`competing.py`), and a table says by how much that slows each.
`--full` has five seeds, 64 and 256 rollouts an update, and TRL with vLLM, too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from counterpoint.models.build import resolve_model
from perf.time_to_reward.competing import competing_load
from perf.time_to_reward.measure import SIDES, run_side
from perf.time_to_reward.report import summary, tables
from perf.time_to_reward.settings import GROUP_SIZE, TASKS, Settings


def main() -> None:
    """Runs the command."""
    options = _options()
    console = Console(stderr=True)
    if options.full:
        options.seeds, options.rollouts, options.sides = list(range(5)), [64, 256], list(SIDES)
    model = str(resolve_model(TASKS[options.task].model, lambda line: console.print(line, highlight=False)))
    result: dict[str, Any] = {"updates": options.updates, "sizes": {}}
    for rollouts in options.rollouts:
        runs = []
        for run in _compare(options, model, rollouts, console):
            runs.append(run)
            result["sizes"][str(rollouts)] = {"summary": summary(runs), "runs": runs}
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=1))
        printer = Console()
        printer.print(f"{rollouts} rollouts an update, {options.updates} updates, {len(options.seeds)} seeds")
        for table in tables(runs):
            printer.print(table)


def _compare(options: argparse.Namespace, model: str, rollouts: int, console: Console) -> Iterator[dict[str, Any]]:
    """Runs all sides once for each seed; yields the figures of each run."""
    with tempfile.TemporaryDirectory(prefix="time_to_reward_") as directory:
        for number, seed in enumerate(options.seeds):
            settings = Settings(model, seed, options.updates, rollouts // GROUP_SIZE, GROUP_SIZE, options.task)
            sides = options.sides if number % 2 == 0 else options.sides[::-1]
            for side, busy in ((side, busy) for side in sides for busy in (False, True)[: 1 + options.busy]):
                with competing_load() if busy else nullcontext() as load:
                    figures = run_side(side, settings, Path(directory) / f"{number}_{side}_{busy}", load).figures()
                console.print(
                    f"seed {seed} {side}{', busy' * busy}: {figures['wall_seconds']:.1f} s, "
                    f"{figures['cpu_seconds']:.1f} s of CPU, "
                    f"update {figures['step_seconds']:.3f} s, start-up {figures['start_up_seconds']:.1f} s, "
                    f"reward at the end {figures['tenths'][-1]:.3f}",
                    highlight=False,
                )
                yield {"round": number, "busy": busy, **figures}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.time_to_reward", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--task", choices=TASKS, default="words", help="sums takes a language model of 135 M parameters"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[64], help="rollouts of an update, multiples of 8")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["ours", "ours-ahead", "trl"])
    parser.add_argument("--busy", action="store_true", help="run each side beside a competing load, too")
    parser.add_argument("--full", action="store_true", help="five seeds, 64 and 256 rollouts, and TRL with vLLM")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if any(rollouts % GROUP_SIZE for rollouts in options.rollouts) or options.updates < 10:
        parser.error(f"--rollouts takes multiples of {GROUP_SIZE}, --updates at least 10")
    return options


if __name__ == "__main__":
    main()
