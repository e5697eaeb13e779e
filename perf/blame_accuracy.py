"""Measures how often `LoopBlame` names the right line, for known culprits alone and beside threads that compete for the GIL.

    python -m perf.blame_accuracy [--moments 30] [--json]

A late moment counts for the cause of the largest share of it; time that other processes took is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import orjson
import uvloop
from rich.console import Console

from orchestrator.loop_health.blame import LoopBlame
from orchestrator.loop_health.blame_evidence import Kind
from orchestrator.loop_health.slow_spots import SlowSpot
from orchestrator.loop_health.threads import prompt_switching
from perf.figures import Case, Figure

THRESHOLD_SECONDS = 0.02
HELD_SECONDS = 0.08
_NUMBERS = [1.5] * 3_000_000
_BYTES = bytes(60_000_000)


def python() -> None:
    """Runs bytecode."""
    end = time.perf_counter() + HELD_SECONDS
    while time.perf_counter() < end:  # the line
        pass


def c_call() -> None:
    """Makes one call that holds the GIL."""
    orjson.dumps(_NUMBERS)  # the line


def c_operator() -> bytes:
    """Applies one operator that holds the GIL, after which the interpreter does not check whether a thread waits for it."""
    return _BYTES + _BYTES  # the line


def c_call_without_gil() -> None:
    """Makes one call that releases the GIL and computes."""
    zlib.compress(_BYTES)  # the line


def sleep() -> None:
    """Makes one call that waits."""
    time.sleep(HELD_SECONDS)  # the line


@dataclass(frozen=True, slots=True)
class Culprit:
    """Code that makes the loop late, and what blame should name."""

    name: str
    function: Callable[[], object]
    kind: Kind = Kind.CALLBACK
    elsewhere: bool = False
    """Whether it runs in a thread."""


CULPRITS = (
    Culprit("Python", python),
    Culprit("a C call with the GIL", c_call),
    Culprit("a C operator with the GIL", c_operator),
    Culprit("a C call without the GIL", c_call_without_gil),
    Culprit("a wait", sleep, Kind.WAIT),
    Culprit("a C call with the GIL in a thread", c_call, Kind.GIL, elsewhere=True),
)


@contextmanager
def company(computing: int, resting: int) -> Iterator[None]:
    """Runs threads that compute in Python all the time, and threads that sleep for a millisecond in between."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(number * number for number in range(1000))

    def compute_and_rest() -> None:
        while not stop.wait(0.001):
            sum(number * number for number in range(1000))

    threads = [threading.Thread(target=compute) for _ in range(computing)]
    threads += [threading.Thread(target=compute_and_rest) for _ in range(resting)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


async def found(culprit: Culprit, moments: int) -> Counter[str]:
    """Counts how often blame named the line, its caller or thread at least, something else, or nothing."""
    verdicts: Counter[str] = Counter()
    generator = random.Random(0)
    lines, first = inspect.getsourcelines(culprit.function)
    line = first + next(index for index, text in enumerate(lines) if "# the line" in text)
    with LoopBlame(THRESHOLD_SECONDS) as blame:
        for _ in range(moments):
            await asyncio.sleep(generator.uniform(1, 3) * THRESHOLD_SECONDS)
            blame.take()
            if culprit.elsewhere:
                await asyncio.to_thread(culprit.function)
            else:
                culprit.function()
            await asyncio.sleep(2 * THRESHOLD_SECONDS)
            slow_spots = [each for each in blame.take().worst() if each.kind is not Kind.MACHINE]
            verdicts[_verdict(culprit, line, slow_spots[0]) if slow_spots else "missed"] += 1
    return verdicts


def _verdict(culprit: Culprit, line: int, slow_spot: SlowSpot) -> str:
    named = slow_spot.place.function
    if named not in (culprit.function.__name__, "found", ""):
        return "wrong"
    if slow_spot.kind is not culprit.kind:
        return "missed"
    if named != culprit.function.__name__:
        return "nearly"
    return "line" if abs(slow_spot.place.line - line) <= (culprit.function is python) else "nearly"


def measure(moments: int) -> list[Case]:
    """Returns a case for each set of threads beside the culprits."""
    cases = []
    for name, computing, resting in (
        ("alone", 0, 0),
        ("beside 4 threads that rest", 0, 4),
        ("beside 2 that do not", 2, 0),
    ):
        figures = []
        for culprit in CULPRITS:
            with company(computing, resting), prompt_switching():
                verdicts = uvloop.run(found(culprit, moments))
            for verdict, words in (
                ("line", "its line"),
                ("nearly", "its caller or thread"),
                ("wrong", "somebody else"),
            ):
                figures.append(Figure(f"{culprit.name}: {words}", 100 * verdicts[verdict] / moments, "%"))
        cases.append(Case(f"blame finds, {name}", figures))
    return cases


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=30, help="late moments a culprit")
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    cases = measure(arguments.moments)
    if arguments.json:
        print(json.dumps([case.as_json() for case in cases], indent=2))
    else:
        for case in cases:
            Console().print(case.as_table())


if __name__ == "__main__":
    main()
