"""The demo of many runs, `make demo-multi`: one run of a job is evicted, another joins, and the rest must not notice.

    python -m perf.demo_multi [--output_dir DIRECTORY] [--fresh] [ARGUMENTS of counterpoint run]

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
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from counterpoint.job.reading.log_files import log_files_in
from perf.chaos.disk import json_lines
from perf.commands import Command, PerfError, say, until

CONFIGS = Path(__file__).parents[1] / "configs"
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

REPEATED = re.compile(r"Request of \S+, attempt \d+, failed")
"""The words of a run's log for a request that is tried again (`counterpoint/inference/pool/pool.py`)."""


class Event(NamedTuple):
    """What was done to one run while the others trained."""

    name: str
    run_id: str
    began: float
    ended: float


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.demo_multi", description="four runs, one evicted, one late", allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo-multi"))
    given, for_the_job = parser.parse_known_args(arguments)
    try:
        return run_demo(given.output_dir, for_the_job)
    except PerfError as error:
        say(f"demo-multi: {error}")
        return error.code
    except KeyboardInterrupt:
        return 130


def run_demo(directory: Path, for_the_job: list[str]) -> int:
    """Runs the demo in a job's directory and checks its claims; returns the exit code."""
    runs = [run["run_id"] for run in tomllib.loads(JOB.read_text())["runs"]]
    others = [run_id for run_id in runs if run_id != EVICTED]
    began = time.time()
    with Command(None, "run", str(JOB), "--output_dir", str(directory), *for_the_job) as job:
        until("each run to get under way", lambda: least(directory, runs, began) >= UNDER_WAY_STEPS, [job])
        until(f"the reward of run {EVICTED} to rise", lambda: rise(directory, EVICTED) >= RISE, [job])
        say(f"{EVICTED} has learned enough, and is evicted")
        asked = time.time()
        with Command(None, "stop", EVICTED, "--job", str(directory), "--evict", REASON) as stop:
            stop.succeed()
        if job.ended:
            raise PerfError("the job ended with the run that was evicted", job.code or 1)
        eviction = Event("eviction", EVICTED, asked, time.time())

        there = least(directory, others, began)
        until("the others to go on", lambda: least(directory, others, began) >= there + UNDER_WAY_STEPS, [job])
        say(f"run {GUEST_ID} joins")
        log = directory / f"orchestrator_{GUEST_ID}.log"
        with Command(log, "orchestrator", str(GUEST), "--join", str(directory)) as guest:
            asked = time.time()
            until(f"the first step of run {GUEST_ID}", lambda: GUEST_ID in updates(directory), [job, guest])
            joining = Event("joining", GUEST_ID, asked, time.time())
            say(f"run {GUEST_ID} has taken its first step")
            code_of_guest = guest.wait()
        code_of_job = job.wait()

    events, times, flawed = (eviction, joining), updates(directory), False
    summary = json.loads((directory / "summary.json").read_text())["runs"]
    for run_id in (*runs, GUEST_ID):
        say(line_of(run_id, summary[run_id], times[run_id], events))
        for mark, words in findings(
            run_id, summary[run_id], times[run_id], events, repeated_requests(directory, run_id)
        ):
            say(f"{mark} {words}")
            flawed |= mark == "✗"
    for what, code, expected in (("job", code_of_job, EXIT_EVICTED), ("guest", code_of_guest, 0)):
        if code != expected:
            say(f"✗ the {what}'s exit code is {code}; expected {expected}")
            flawed = True
    say("some claims do not hold" if flawed else "✓ no run noticed the eviction or the joining of another")
    return int(flawed)


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


def findings(
    run_id: str, summary: dict[str, Any], times: list[float], events: Sequence[Event], repeated: int
) -> Iterator[tuple[str, str]]:
    """Yields the claims that do not hold for a run, marked ✗, and those that a noisy machine does not let one judge, marked ?.

    `summary` is the run's part of `summary.json`, `times` are those of its updates.
    """
    first, last = summary["reward"]["first"], summary["reward"]["last"]
    if last - first < RISE:
        yield "✗", f"{run_id}: reward {first:.3f} to {last:.3f} is no rise by {RISE}"
    apart = longest_of(set(pairwise(times)).difference(*(around(event, times) for event in events))) or 0.0
    for event in events:
        longest, usual = longest_of(around(event, times)), median_step(times)
        if event.run_id == run_id or longest is None or longest <= LONGEST_STEP * usual:
            continue
        step = f"{run_id}: a step of {longest:.2f} s around the {event.name}"
        words = f"{step} is longer than {LONGEST_STEP:g} medians of {usual:.2f} s"
        if longest > apart:
            yield "✗", words
        else:
            yield "?", f"{words}; away from the events one took {apart:.2f} s, so the machine is too noisy to judge it"
    failed, ended = summary["rollouts"]["failed"], summary["outcome"]
    if failed or repeated:
        yield "✗", f"{run_id}: {failed} rollouts failed, {repeated} requests were tried again"
    if ended != (expected := f"evicted: {REASON}" if run_id == EVICTED else "done"):
        yield "✗", f"{run_id}: ended as {ended!r}; expected {expected!r}"


def line_of(run_id: str, summary: dict[str, Any], times: list[float], events: Sequence[Event]) -> str:
    """Returns what a person wants to know of a run: its steps, its reward, and its longest steps around the events."""
    reward, usual = summary["reward"], median_step(times)
    seen = ((event.name, longest_of(around(event, times))) for event in events if event.run_id != run_id)
    longest = "".join(f", longest around the {name} {each:.2f} s" for name, each in seen if each is not None)
    steps = f"{summary['steps']['trained']} steps, reward {reward['first']:.3f} → {reward['last']:.3f}"
    return f"{run_id}: {steps}; median step {usual:.2f} s{longest}"


def median_step(times: list[float]) -> float:
    """Returns the median time of a step, in seconds."""
    return median(end - start for start, end in pairwise(times))


def around(event: Event, times: list[float]) -> list[tuple[float, float]]:
    """Returns a run's steps around an event, each as its beginning and end."""
    steps = [(start, end) for start, end in pairwise(times) if end > event.began]
    after = next((start for start, _ in steps if start >= event.ended), event.ended)
    return [(start, end) for start, end in steps if start <= after]


def longest_of(steps: Iterable[tuple[float, float]]) -> float | None:
    """Returns the seconds of the longest of `steps`; None without any."""
    return max((end - start for start, end in steps), default=None)


if __name__ == "__main__":
    sys.exit(main())
