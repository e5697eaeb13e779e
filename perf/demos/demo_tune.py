"""`make demo-tune`: a population of eight runs in one job, beside random search with the same budget, and one run alone.

    python -m perf.demos.demo_tune [--output_dir DIRECTORY]

Everything is real, and done by commands of the user's. One job (`configs/demo-tune-job.toml`) stays for all trials. First
`configs/demo-tune.toml` tunes learning rate and temperature by population based training: losers copy winners inside the trainer.
Then random search runs the same eight first configurations to the same step, without copies. At last one of these configurations
runs in a job of its own, so that the seconds can be compared: eight such jobs are not run, but reckoned, one after another.

It draws `population.png`, prints the best configuration, and checks what must hold whatever the rewards are: every trial ended
well, each step of each run was counted once, and something was copied. The exit code is 0 if so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table

from perf.chaos.disk import json_lines
from perf.commands import Command, DemoError, is_ready, until
from perf.demos.population_picture import TrialCurve, draw

CONFIGS = Path(__file__).parents[2] / "configs"
JOB, TUNE = CONFIGS / "demo-tune-job.toml", CONFIGS / "demo-tune.toml"

METRIC = "reward/mean"
LAST_STEPS = 5
"""A trial's reward is the mean of so many steps at its end."""

WIDTH = 130


@dataclass(frozen=True)
class Search:
    """One of the two searches, when it is over."""

    name: str
    seconds: float
    trials: list[TrialCurve]

    @property
    def best(self) -> TrialCurve:
        """The trial with the highest reward at its end."""
        return max(self.trials, key=final_reward)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.demos.demo_tune", description="a population in one job", allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo-tune"))
    given = parser.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        return run_demo(given.output_dir.absolute(), console)
    except DemoError as error:
        console.print(f"demo-tune: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def run_demo(directory: Path, console: Console) -> int:
    """Runs both searches and the job of one run, below a directory; returns the exit code."""
    began = time.monotonic()
    job, logs = directory / "job", directory / "logs"
    move_aside(directory)
    logs.mkdir(parents=True)
    with Command(logs / "job.log", "run", str(JOB), "--output_dir", str(job)) as fleet:
        say(console, f"the job of all trials starts: {fleet.log}")
        until("the job to be ready", lambda: is_ready(job), [fleet])
        boot = time.monotonic() - began
        searches = []
        for name in ("population", "random"):
            file = directory / f"{name}.toml"
            file.write_text(tomli_w.dumps(settings_of(name, job, directory)))
            say(console, f"{name}: counterpoint tune {file}")
            searches.append(search(name, file, directory, fleet))
    say(console, "one run alone, in a job of its own")
    alone = run_alone(directory, searches[1].best)
    return report(directory, searches, boot, alone, console)


def settings_of(name: str, job: Path, directory: Path) -> dict[str, Any]:
    """Returns the file of one search: both join the same job, and random search has no scheduler."""
    settings = tomllib.loads(TUNE.read_text())
    settings |= {"name": name, "local_dir": str(directory), "job": {"join": str(job)}}
    if name == "random":
        del settings["scheduler"]
    return settings


def search(name: str, file: Path, directory: Path, fleet: Command) -> Search:
    """Runs `counterpoint tune`, which shows its lines; returns what came of it."""
    began = time.monotonic()
    with Command(None, "tune", str(file)) as command:
        until(f"the end of {name}", lambda: command.ended, [fleet])
        command.succeed()
    return Search(name, time.monotonic() - began, curves_of(directory / name))


def run_alone(directory: Path, of: TrialCurve) -> float:
    """Runs one configuration as a job of its own, `counterpoint run`; returns its seconds from start to end."""
    job, tune = tomllib.loads(JOB.read_text()), tomllib.loads(TUNE.read_text())
    run = tune["run"] | {"steps": int(tune["stop"]["metrics"]["step"])}
    run["sampling"] = run["sampling"] | {"temperature": of.temperatures[-1]}
    run["training"] = run["training"] | {"learning_rate": of.learning_rates[-1]}
    del job["stay"]
    job |= {"output_dir": str(directory / "alone"), "orchestrator": run}
    file = directory / "alone.toml"
    file.write_text(tomli_w.dumps(job))
    began = time.monotonic()
    with Command(directory / "logs" / "alone.log", "run", str(file)) as command:
        command.succeed()
    return time.monotonic() - began


# --- what the files say ---


def curves_of(experiment: Path) -> list[TrialCurve]:
    """Returns the trials of an experiment: each step of their runs with its reward and its values, and the copies."""
    trials = json.loads((experiment / "experiment_state.json").read_text())["trials"]
    decisions = json_lines(experiment / "pbt_global.txt")  # loser, winner, their iterations, and both configurations
    names = {tag_number(trial["experiment_tag"]): str(number) for number, trial in enumerate(trials)}
    found = []
    for number, trial in enumerate(trials):
        results = json_lines(Path(trial["logdir"]) / "result.json")
        curve = TrialCurve(
            str(number), trial["status"], [each["step"] for each in results], [each[METRIC] for each in results], [], []
        )
        values = (
            trial["evaluated_params"]["training/learning_rate"],
            trial["evaluated_params"]["sampling/temperature"],
        )
        changes = [(0, values)]
        for loser, winner, iteration, _, _, new in decisions:
            if names[tag_number(loser)] == curve.name and (step := first_after(results, changes[-1][0], iteration)):
                curve.copies.append((step, names[tag_number(winner)]))
                changes.append((step, (new["training"]["learning_rate"], new["sampling"]["temperature"])))
        for step in curve.steps:
            rate, temperature = next(values for since, values in reversed(changes) if since <= step)
            curve.learning_rates.append(rate)
            curve.temperatures.append(temperature)
        found.append(curve)
    return found


def first_after(results: Sequence[dict[str, Any]], since: int, iteration: int) -> int | None:
    """Returns the first step that was reported after the decision at an iteration; None if the trial ended before.

    Iterations of a trial that has copied another count on from that one's, so only those from step `since` on are compared.
    """
    decided = [each["step"] for each in results if each["step"] >= since and each["training_iteration"] == iteration]
    return next((each["step"] for each in results if decided and each["step"] > decided[0]), None)


def final_reward(trial: TrialCurve) -> float:
    """Returns the mean reward of a trial's last steps."""
    return fmean(trial.rewards[-LAST_STEPS:])


# --- the verdict ---


def report(directory: Path, searches: Sequence[Search], boot: float, alone: float, console: Console) -> int:
    """Prints what came of it, draws the picture, and returns the exit code."""
    population, random = searches
    picture = draw([(each.name, each.trials) for each in searches], directory / "population.png")
    table = Table(title="reward of the last 5 steps, of each trial", title_justify="left")
    for column in (
        "trial",
        "population",
        "learning rate",
        "temperature",
        "copied",
        "random",
        "learning rate",
        "temperature",
    ):
        table.add_column(column, justify="right")
    for left, right in zip(population.trials, random.trials, strict=True):
        table.add_row(
            left.name, f"{final_reward(left):.3f}", f"{left.learning_rates[-1]:.1e}", f"{left.temperatures[-1]:.2f}",
            " ".join(f"{winner} at {step}" for step, winner in left.copies) or "-",
            f"{final_reward(right):.3f}", f"{right.learning_rates[-1]:.1e}", f"{right.temperatures[-1]:.2f}",
        )  # fmt: skip
    console.print(table)
    for each in searches:
        best = each.best
        console.print(
            f"{each.name}: best reward {final_reward(best):.3f} with training.learning_rate = {best.learning_rates[-1]:.3g}, "
            f"sampling.temperature = {best.temperatures[-1]:.3g}; mean of all {fmean(map(final_reward, each.trials)):.3f}"
        )
    count, together = len(population.trials), boot + population.seconds
    console.print(
        f"seconds: the job's start {boot:.0f}, the population {population.seconds:.0f}, random search {random.seconds:.0f}\n"
        f"{count} runs in one job, its start included: {together:.0f} s. One run in a job of its own: {alone:.0f} s, measured; "
        f"{count} such jobs one after another: {count * alone:.0f} s, extrapolated, {count * alone / together:.1f} times as long"
    )
    console.print(f"picture: {picture}")
    flaws = [flaw for each in searches for flaw in flaws_of(each)]
    if not any(trial.copies for trial in population.trials):
        flaws.append("population: no trial has copied another")
    for flaw in flaws:
        console.print(f"✗ {flaw}", style="red", markup=False)
    if not flaws:
        console.print(
            "✓ every trial ended well; each step of each run was counted once; losers copied winners", style="green"
        )
    return 1 if flaws else 0


def flaws_of(search: Search) -> list[str]:
    """Returns what must not be, whatever the rewards are."""
    flaws = []
    for trial in search.trials:
        if trial.status != "TERMINATED":
            flaws.append(f"{search.name}, trial {trial.name}: ended as {trial.status}")
        unmade = set(range(1, trial.steps[-1] + 1)) - set(trial.steps)
        if len(set(trial.steps)) < len(trial.steps) or trial.steps != sorted(trial.steps):
            flaws.append(f"{search.name}, trial {trial.name}: a step was counted twice: {trial.steps}")
        if len(unmade) > 3 * len(trial.copies):
            flaws.append(f"{search.name}, trial {trial.name}: steps {sorted(unmade)} were not counted")
    return flaws


def tag_number(tag: str) -> str:
    """Returns the number with which a trial's tag begins; what follows changes with its configuration."""
    return tag.partition("_")[0].partition("@")[0]


def move_aside(directory: Path) -> None:
    """Moves what an earlier demo left."""
    if directory.exists():
        number = 1
        while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
            number += 1
        directory.rename(aside)


def say(console: Console, text: str) -> None:
    """Prints a line with the time."""
    console.print(f"── {time.strftime('%H:%M:%S')} {text}", style="bold")


if __name__ == "__main__":
    sys.exit(main())
