"""Trains a mix whose hard examples are slow, once for each choice about stragglers: what does each learn in the same time?

    python -m perf.straggler_study [--minutes 30] [--delay 15] [--seeds 3] [--directory outputs/stragglers]
    python -m perf.straggler_study --table DIRECTORY

All choices and seeds are runs of one job, beside one trainer and one vLLM: they have the same machine at the same time, whatever
else it does. A fast example is a word to reverse, in one turn; a slow one a number to guess, in up to three, and the tool that
answers a guess takes `--delay` seconds. Evaluations play both without the delay.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import tomli_w
from rich.console import Console
from rich.table import Table

import counterpoint
from counterpoint.environments.base import Example, Model
from counterpoint.environments.tasks.guess_number import GuessNumber
from counterpoint.environments.tasks.reverse_text import ReverseText
from counterpoint.job.evaluation.server import free_port
from counterpoint.transport.records import Rollout, Turn
from perf.commands import Command

if TYPE_CHECKING:
    from pandas import DataFrame

BASE = Path(__file__).parents[1] / "configs" / "demo-multi.toml"
"""The job whose model, server, trainer and sampling these runs have."""

FAST, SLOW = 300, 100
"""The examples of each kind."""

CHOICES: dict[str, dict[str, Any]] = {
    "drop": {"stragglers": "drop"},
    "wait": {"stragglers": "wait"},
    "older": {"stragglers": "drop", "max_off_policy_steps": 32},
}
"""The schedule of each choice."""

POINTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The parts of the time after which rewards are shown."""


class SlowGuesses:
    """`slow` numbers to guess, of which each answer takes `delay` seconds, then `fast` words to reverse."""

    group_scoring = False
    reward_bounds = (0.0, 1.0)
    state_keys = ("answer", "guesses")

    def __init__(self, fast: int = FAST, slow: int = SLOW, delay: float = 0.0) -> None:
        self._slow, self._delay, self._fast = slow, delay, fast
        self._words, self._numbers = ReverseText(max(fast, 1)), GuessNumber()

    def __len__(self) -> int:
        return self._slow + self._fast

    def _task(self, index: int) -> GuessNumber | ReverseText:
        return self._numbers if index < self._slow else self._words

    def example(self, index: int) -> Example:
        """See `Environment`."""
        own = index % len(self._numbers) if index < self._slow else index - self._slow
        return replace(self._task(index).example(own), index=index)

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """See `Environment`."""
        await self._task(example.index).rollout(example, cast("Model", _SlowlyAnswered(model, self._delay)), state)

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Returns the task's own reward."""
        return await self._task(example.index).score(example, rollout)

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """See `Environment`."""
        raise NotImplementedError("each rollout is scored by itself")


class _SlowlyAnswered:
    """A model of which each turn but the first begins `delay` seconds later."""

    def __init__(self, model: Model, delay: float) -> None:
        self._model, self._delay = model, delay
        self.chat = model.chat
        self._began = False

    async def generate(self, prompt_ids: Sequence[int]) -> Turn:
        if self._began:
            await asyncio.sleep(self._delay)
        self._began = True
        return await self._model.generate(prompt_ids)


def job(directory: Path, delay: float, seeds: int) -> dict[str, Any]:
    """Returns the job's file. `directory` is where it writes."""

    def environment(name: str, **args: float) -> dict[str, Any]:
        return {"name": name, "kind": "perf.straggler_study:SlowGuesses", "args": args}

    base = tomllib.loads(BASE.read_text())
    own = base["orchestrator"]
    own["steps"], own["environments"] = 1000, [environment("mix", delay=delay)]
    own["schedule"] = {"group_size": 8, "rollouts_per_step": 32, "max_inflight_rollouts": 64}
    own["training"]["learning_rate"] = 2e-3
    both = [environment("fast", fast=8, slow=0), environment("slow", fast=0, slow=7)]
    own["evaluations"] = [{"name": "both", "rollouts_per_example": 4, "environments": both}]
    runs = [
        {"run_id": f"{choice}-{seed}", "seed": seed, "schedule": schedule}
        for seed in range(seeds)
        for choice, schedule in CHOICES.items()
    ]
    base["inference"]["port"] = free_port("127.0.0.1", 0)
    del base["trainer"]["max_runs"]
    return base | {"output_dir": str(directory), "runs": runs}


def show(directory: Path) -> None:
    """Prints what each choice's runs have trained and learned: means over seeds, with the least and the most in brackets."""
    results = counterpoint.read(directory)
    steps, rollouts, evaluations = results.steps(), results.rollouts(), results.evaluations()
    start, end = steps["time"].min(), steps["time"].max()
    table = Table(title=f"{end - start:.0f} s; rewards after {', '.join(f'{point:.0%}' for point in POINTS)} of them")
    for column in ("choice", "steps", "trained: slow", "staleness", "reward: fast", "reward: slow"):
        table.add_column(column)
    trained = rollouts[rollouts[["dropped", "error", "filtered_by"]].isna().all(axis=1)]
    for choice in CHOICES:
        runs = [run for run in results.runs if run.startswith(f"{choice}-")]
        made = [steps[steps["run_id"] == run] for run in runs]
        table.add_row(
            choice,
            _spread([each["step"].max() for each in made], ".0f"),
            _spread([(trained[trained["run_id"] == run]["example_index"] < SLOW).mean() for run in runs], ".1%"),
            _spread([each["staleness/mean"].mean() for each in made], ".1f"),
            *(
                "\n".join(
                    _spread([_reward(evaluations, run, kind, start + point * (end - start)) for run in runs], ".2f")
                    for point in POINTS
                )
                for kind in ("fast", "slow")
            ),
        )
    Console(width=130).print(table)


def _reward(evaluations: DataFrame, run: str, kind: str, until: float) -> float:
    """Returns the newest reward by then, or the first."""
    found = evaluations[(evaluations["run_id"] == run) & (evaluations["metric"] == f"{kind}/reward/mean")]
    by_then = found[found["time"] <= until]
    return float(by_then["value"].iloc[-1] if len(by_then) else found["value"].iloc[0])


def _spread(values: Sequence[float], form: str) -> str:
    mean, least, most = (format(each, form) for each in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({least} to {most})"


def main() -> None:
    """Runs the job, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m perf.straggler_study", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--delay", type=float, default=15.0, help="seconds that an answer of the slow tool takes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("outputs/stragglers"), help="a new one")
    parser.add_argument("--table", type=Path, metavar="DIRECTORY", help="print the table of this one, and run nothing")
    given = parser.parse_args()
    if given.table is None:
        given.directory.mkdir(parents=True)
        file = given.directory / "study.toml"
        file.write_text(tomli_w.dumps(job((given.directory / "job").absolute(), given.delay, given.seeds)))
        with Command(given.directory / "job.log", "run", str(file)) as command:
            deadline = time.monotonic() + 60 * given.minutes
            while not command.ended and time.monotonic() < deadline:
                time.sleep(1.0)
    show((given.table or given.directory) / "job")


if __name__ == "__main__":
    main()
