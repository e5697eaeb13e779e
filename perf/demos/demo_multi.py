"""The demo of many runs, `make demo-multi`: one run of a job is evicted, another joins, and the rest must not notice.

    python -m perf.demos.demo_multi [--output_dir DIRECTORY] [--fresh] [ARGUMENTS of counterpoint run]

Everything is done by commands of the user's, each a process of its own. Four runs share a trainer and a server. Once all have
begun and one of them has learned something, that one is evicted; later a fifth run joins, in the slot that became free. When all
have ended, the demo checks and shows:

- every run's reward has risen, the evicted one's and the guest's included;
- of the other runs, no step around an event took longer than twice the run's median step. A step lasts from one update of the
  run's weights to its next (`time` in `trainer/metrics.jsonl`). An event lasts from the command until the evicted orchestrator
  has ended, or until the guest's first update; around it are the steps in progress at any time of it, and the one after them.
  Other causes of a long step count, too, unless a step away from the events took as long: then the machine is too noisy to
  judge it, which the demo says;
- no rollout failed, and no request had to be tried again;
- each run ended as it should.

The exit code is 0 if none of this is false, 1 if some is, and the job's own if the job failed before.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from counterpoint.job.reading.log_files import log_files_in
from perf.chaos.disk import json_lines
from perf.commands import Command, DemoError, until

CONFIGS = Path(__file__).parents[2] / "configs"
JOB, GUEST = CONFIGS / "demo-multi.toml", CONFIGS / "roles" / "guest.toml"
EVICTED, GUEST_ID = "guess-fast", "guest"
REASON = "the demo wants its place"
EXIT_EVICTED = 3
"""A job's exit code where one of its runs was evicted and the others are done."""

EDGE_STEPS = 5
"""Rewards are compared between the means of so many steps at a run's beginning and at its end, as in `summary.json`."""

RISE = 0.1
"""The least rise of every run's reward; at these tasks chance moves a mean of so many rollouts by less than 0.03."""

UNDER_WAY_STEPS = 10
"""The steps of each run before the first event, and of the others between the two events."""

LONGEST_STEP = 2.0
"""The longest step allowed around an event, in medians."""

WIDTH = 130
"""The width of the table where output is no terminal."""

REPEATED = re.compile(r"Request of \S+, attempt \d+, failed")
"""The words of a run's log for a request that is tried again (`counterpoint/inference/pool/pool.py`)."""


@dataclass(frozen=True)
class Event:
    """What was done to one run while the others trained."""

    name: str
    run_id: str
    began: float
    ended: float


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.demos.demo_multi", description="four runs, one evicted, one late", allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo-multi"))
    given, for_the_job = parser.parse_known_args(arguments)
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        return run_demo(given.output_dir, for_the_job, console)
    except DemoError as error:
        console.print(f"demo-multi: {error}", style="red", markup=False)
        return error.code
    except KeyboardInterrupt:
        return 130


def run_demo(directory: Path, for_the_job: list[str], console: Console) -> int:
    """Runs the demo in a job's directory and checks its claims."""
    runs = [run["run_id"] for run in tomllib.loads(JOB.read_text())["runs"]]
    others = [run_id for run_id in runs if run_id != EVICTED]

    def say(text: str) -> None:
        console.print(f"── {text}", style="bold")

    began = time.time()
    with Command(None, "run", str(JOB), "--output_dir", str(directory), *for_the_job) as job:
        until("each run to get under way", lambda: least(directory, runs, began) >= UNDER_WAY_STEPS, [job])
        until(f"the reward of run {EVICTED} to rise", lambda: rise(directory, EVICTED) >= RISE, [job])
        say(f"{EVICTED} has learned enough, and is evicted")
        eviction = evict(directory, job)

        there = least(directory, others, began)
        until("the others to go on", lambda: least(directory, others, began) >= there + UNDER_WAY_STEPS, [job])
        say(f"run {GUEST_ID} joins")
        log = directory / f"orchestrator_{GUEST_ID}.log"
        with Command(log, "orchestrator", str(GUEST), "--join", str(directory)) as guest:
            joining = join(directory, job, guest)
            say(f"run {GUEST_ID} has taken its first step")
            code_of_guest = guest.wait()
        code_of_job = job.wait()

    console.print()
    return verdict_of(directory, [*runs, GUEST_ID], [eviction, joining], (code_of_job, code_of_guest), console)


def evict(directory: Path, job: Command) -> Event:
    """Evicts a run; returns once its orchestrator has ended."""
    began = time.time()
    with Command(None, "stop", EVICTED, "--job", str(directory), "--evict", REASON) as stop:
        stop.succeed()
    if job.ended:
        raise DemoError("the job ended with the run that was evicted", job.code or 1)
    return Event("eviction", EVICTED, began, time.time())


def join(directory: Path, job: Command, guest: Command) -> Event:
    """Returns once the guest, which has just been started, has trained its first step."""
    began = time.time()
    until(f"the first step of run {GUEST_ID}", lambda: GUEST_ID in updates(directory), [job, guest])
    return Event("joining", GUEST_ID, began, time.time())


# --- what the job's files say ---


def updates(directory: Path) -> dict[str, list[float]]:
    """Returns the times of each run's updates, by run."""
    found: dict[str, list[float]] = {}
    for line in json_lines(directory / "trainer" / "metrics.jsonl"):
        found.setdefault(line["run_id"], []).append(line["time"])
    return found


def least(directory: Path, runs: list[str], since: float) -> int:
    """Returns the steps that every one of `runs` has trained since then, without those of an earlier job in the directory."""
    known = updates(directory)
    return min(sum(when > since for when in known.get(run_id, [])) for run_id in runs)


def rise(directory: Path, run_id: str) -> float:
    """Returns the rise of a run's reward so far."""
    rewards = [line["reward/mean"] for line in json_lines(directory / f"run_{run_id}" / "metrics.jsonl")]
    if len(rewards) < 2 * EDGE_STEPS:
        return 0.0
    return (sum(rewards[-EDGE_STEPS:]) - sum(rewards[:EDGE_STEPS])) / EDGE_STEPS


def repeated_requests(directory: Path, run_id: str) -> int:
    """Counts the requests of a run that were tried again."""
    return len(REPEATED.findall(log_files_in(directory)[run_id].read_text()))


# --- the verdict ---


@dataclass(frozen=True)
class Row:
    """The result of one run."""

    run_id: str
    steps: int
    first: float
    last: float
    median_step: float
    """The median time of a step, in seconds."""
    longest: dict[str, float | None]
    """Seconds of its longest step around each event; None for those that are its own, or came after its end."""
    longest_apart: float
    """Seconds of its longest step away from all events."""
    failed: int
    repeated: int
    ended: str

    def flaws(self, ending: str) -> Iterator[str]:
        """Yields the claims that do not hold for the run."""
        if self.last - self.first < RISE:
            yield f"{self.run_id}: reward {self.first:.3f} to {self.last:.3f} is no rise by {RISE}"
        yield from (said for said, longest in self._long_steps() if longest > self.longest_apart)
        if self.failed or self.repeated:
            yield f"{self.run_id}: {self.failed} rollouts failed, {self.repeated} requests were tried again"
        if self.ended != ending:
            yield f"{self.run_id}: ended as {self.ended!r}; expected {ending!r}"

    def doubts(self) -> Iterator[str]:
        """Yields the claims that a noisy machine does not let one judge."""
        for said, longest in self._long_steps():
            if longest <= self.longest_apart:
                yield f"{said}; away from the events one took {self.longest_apart:.2f} s, so the machine is too noisy to judge it"

    def _long_steps(self) -> Iterator[tuple[str, float]]:
        """Yields what is to say of each step around an event that is too long, and its seconds."""
        for event, longest in self.longest.items():
            if longest is not None and longest > LONGEST_STEP * self.median_step:
                yield (
                    f"{self.run_id}: a step of {longest:.2f} s around the {event} is longer than {LONGEST_STEP:g} medians "
                    f"of {self.median_step:.2f} s",
                    longest,
                )


def verdict_of(directory: Path, runs: list[str], events: list[Event], codes: tuple[int, int], console: Console) -> int:
    """Shows the result of each run and whether the claims hold; returns the exit code."""
    summary = json.loads((directory / "summary.json").read_text())["runs"]
    times = updates(directory)
    rows = [row_of(directory, run_id, summary[run_id], times[run_id], events) for run_id in runs]
    console.print(table_of(rows, events))
    flaws = [flaw for row in rows for flaw in row.flaws(f"evicted: {REASON}" if row.run_id == EVICTED else "done")]
    for what, code, expected in (("job", codes[0], EXIT_EVICTED), ("guest", codes[1], 0)):
        if code != expected:
            flaws.append(f"the {what}'s exit code is {code}; expected {expected}")
    for flaw in flaws:
        console.print(f"✗ {flaw}", style="red", markup=False)
    doubts = [doubt for row in rows for doubt in row.doubts()]
    for doubt in doubts:
        console.print(f"? {doubt}", style="yellow", markup=False)
    if not (flaws or doubts):
        console.print(
            f"✓ every run's reward rose; no other run's step around the eviction or the joining took longer than "
            f"{LONGEST_STEP:g} medians; no request failed; every run ended as it should",
            style="green",
        )
    return 1 if flaws else 0


def row_of(directory: Path, run_id: str, summary: dict[str, Any], times: list[float], events: list[Event]) -> Row:
    """Returns a run's numbers, from its part of `summary.json` and the times of its updates."""
    return Row(
        run_id=run_id,
        steps=summary["steps"]["trained"],
        first=summary["reward"]["first"],
        last=summary["reward"]["last"],
        median_step=median(end - start for start, end in pairwise(times)),
        longest={event.name: None if event.run_id == run_id else longest_of(around(event, times)) for event in events},
        longest_apart=longest_of(set(pairwise(times)).difference(*(around(event, times) for event in events))) or 0.0,
        failed=summary["rollouts"]["failed"],
        repeated=repeated_requests(directory, run_id),
        ended=summary["outcome"],
    )


def around(event: Event, times: list[float]) -> list[tuple[float, float]]:
    """Returns a run's steps around an event, each as its beginning and end."""
    steps = [(start, end) for start, end in pairwise(times) if end > event.began]
    after = next((start for start, _ in steps if start >= event.ended), event.ended)
    return [(start, end) for start, end in steps if start <= after]


def longest_of(steps: Iterable[tuple[float, float]]) -> float | None:
    """Returns the seconds of the longest of `steps`; None without any."""
    return max((end - start for start, end in steps), default=None)


def table_of(rows: list[Row], events: list[Event]) -> Table:
    """Returns a table with a line a run: the median step and the longest around each event, in seconds."""
    table = Table(box=box.SIMPLE_HEAD)
    columns = ["run", "steps", "reward", "median step", *(f"longest, {event.name}" for event in events)]
    for column in [*columns, "failed", "tried again", "ended"]:
        table.add_column(column, justify="left" if column in ("run", "ended") else "right")
    for row in rows:
        table.add_row(
            row.run_id,
            str(row.steps),
            f"{row.first:.3f} → {row.last:.3f}",
            f"{row.median_step:.2f} s",
            *(
                "-" if longest is None else f"{longest:.2f} s ({longest / row.median_step:.1f}x)"
                for longest in row.longest.values()
            ),
            str(row.failed),
            str(row.repeated),
            row.ended.partition(":")[0],
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
