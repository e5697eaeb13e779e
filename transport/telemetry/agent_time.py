"""Where the time of an agent's rollout goes: its program's start, what else it does by itself, and calls of the model.

The environment `agent` measures it (`AgentTimes`); step line, status and summary name it (`agents_in_words`), since a step's
phase "generation" has both.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SECONDS, START, OWN = "agent/seconds", "agent/start_seconds", "agent/own_seconds"
"""Metrics of a rollout: the program's whole time, that before its first request, and that without a request in progress."""

_MEAN = re.compile(r"environment/(.+)/(agent/\w+)/mean")
"""The same of a step (`orchestrator/step/step_metrics.py`)."""


class AgentTimes:
    """Times the requests of one session. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None
        self._since = self._answering = 0.0
        self._open = 0

    def request_began(self) -> None:
        """Another request is in progress, or waits."""
        now = self._clock()
        if self._first is None:
            self._first = now
        if not self._open:
            self._since = now
        self._open += 1

    def request_ended(self) -> None:
        """One of them is over."""
        now = self._clock()
        self._open -= 1
        if not self._open:
            self._answering += now - self._since

    def metrics(self, begun: float) -> dict[str, float]:
        """Returns the metrics of a program that began at `begun` and has just ended. Without a request it has only started."""
        now = self._clock()
        answering = self._answering + (now - self._since if self._open else 0.0)
        first = now if self._first is None else self._first
        return {SECONDS: now - begun, START: first - begun, OWN: now - begun - answering}


def agent_times(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns for each environment that has them the means of the metrics over steps' lines, by the metric's name."""
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for name, value in line.items():
            if (named := _MEAN.fullmatch(name)) and isinstance(value, int | float):
                found[named[1]][named[2]].append(value)
    return {
        environment: {name: sum(values) / len(values) for name, values in of_environment.items()}
        for environment, of_environment in sorted(found.items())
        if {SECONDS, START, OWN} <= of_environment.keys()
    }


def programs_share(line: Mapping[str, Any]) -> float:
    """Returns the largest share of a rollout's time that an environment's programs take themselves; 0 without any."""
    return max((each[OWN] / each[SECONDS] for each in agent_times([line]).values() if each[SECONDS] > 0), default=0.0)


def agents_in_words(times: Mapping[str, Mapping[str, float]]) -> str:
    """Returns `agent_times` in one short line; empty without any."""
    return "; ".join(
        f"{environment}: of a rollout's {each[SECONDS]:.1f} s the program takes {each[OWN]:.1f} s itself, "
        f"{each[START]:.1f} s of them before its first request"
        for environment, each in times.items()
    )
