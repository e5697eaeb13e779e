"""Measures a loop beside many servers: 1,024 rollouts in flight at 16, or 16,384 at 256 in full; then two loops with half each.

The daemon's own scheduler, dispatcher, rollouts, step boundary and inference pool run on uvloop (`perf.bench.fleet_daemon`). The
servers answer after times of a law of lengths, and of their answers one in a thousand is a closed connection
(`perf.soak.fleet_servers`, four processes). Beside the policy the pool holds other names of weights, and meanwhile the policy
and the others in turn get new weights again and again.

    python -m perf.bench.fleet [--quick | --full]
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

from perf.bench.command import Size, show
from perf.bench.fleet_daemon import Found, Load, found_by
from perf.bench.servers import served_by
from perf.figures import Case, Figure

PROCESSES = 4
FAILED_SHARE = 0.001
STEP_SHARE = 256
"""A step is of this part of the rollouts in flight."""


def measure(size: Size) -> list[Case]:
    """Measures the case `fleet`."""
    in_flight, servers, names = size.pick((512, 8, 4), (1024, 16, 8), (16_384, 256, 64))
    steps, short = size.pick((60, 40), (500, 200), (500, 250))
    median = size.pick(0.1, 0.5, 6.0)
    load = Load(0, in_flight, names, steps, max(8, in_flight // STEP_SHARE))
    (one,) = _together([load], servers, median)
    half = replace(load, in_flight=in_flight // 2, names=names // 2, steps=short, per_step=max(8, load.per_step // 2))
    two = _together([half, replace(half, daemon=1)], servers, median)
    return [_case(load, servers, one), _case_of_two(half, one, two)]


def _together(loads: Sequence[Load], servers: int, median: float) -> list[Found]:
    """Returns what daemons find that share the servers."""
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        words = (str(median), str(FAILED_SHARE))
        hosts = [stack.enter_context(served_by("perf.soak.fleet_servers", *words)) for _ in range(PROCESSES)]
        urls = [f"{hosts[number % PROCESSES]}/{number}" for number in range(servers)]
        return list(threads.map(lambda load: found_by(load, urls), loads))


def _case(load: Load, servers: int, found: Found) -> Case:
    figures = [
        Figure("rollouts in flight", load.in_flight, ""),
        Figure("steps", load.steps, ""),
        Figure("turns", found.turns, ""),
        Figure("turns a second", found.turns / found.seconds, "1/s"),
        Figure("CPU a turn", found.cost, "us"),
        Figure("lag: mean", 1e3 * found.lag_mean, "ms"),
        Figure("lag: p99", 1e3 * found.lag_p99, "ms", 10.0, unstalled=1e3 * found.unstalled_p99),
        Figure("lag: max", 1e3 * found.lag_max, "ms", 40.0, unstalled=1e3 * found.unstalled_max),
        Figure("until all servers had proven all names", found.start, "s"),
        Figure("CPU of a name's weights at a server: check, load, proof", 1e6 * found.start_cpu, "us"),
        Figure("updates of a name", found.updates, ""),
        Figure("the longest until all servers had proven one", found.longest_update, "s", 2.0),
        Figure("resident size at the end", found.resident / 1e6, "MB"),
        Figure("growth of the resident size a step", found.growth / 1e6, "MB", 0.05, timed=False),
    ]
    return Case(f"fleet, {servers} servers, {load.names} names of weights", figures)


def _case_of_two(half: Load, one: Found, two: Sequence[Found]) -> Case:
    """Compares two daemons of half the load each with the one."""
    rate = sum(each.turns / each.seconds for each in two)
    figures = [
        Figure("rollouts in flight of each", half.in_flight, ""),
        Figure("turns a second of both", rate, "1/s"),
        Figure("turns a second, over those of one", rate / (one.turns / one.seconds), "x"),
        Figure("CPU a turn, over that of one", sum(each.cost for each in two) / 2 / one.cost, "x"),
        Figure("lag: mean, over that of one", sum(each.lag_mean for each in two) / 2 / one.lag_mean, "x"),
        Figure("lag: p99 of the later one", 1e3 * max(each.lag_p99 for each in two), "ms"),
        Figure("lag: max of the later one", 1e3 * max(each.lag_max for each in two), "ms"),
        Figure("the longest until all servers had proven an update", max(each.longest_update for each in two), "s"),
    ]
    return Case("fleet, two daemons of half the load each", figures)


if __name__ == "__main__":
    show(measure)
