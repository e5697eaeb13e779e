"""Measures environments in workers: 4,096 sessions in 8 workers, beside the same rollouts of `schedule` in the loop itself.

The two are measured in turn, several times, and each figure is the median of its own: the lag of two runs of the same code
differs by some tenths.

    python -m perf.bench.env_workers [--quick | --full]
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import uvloop

from orchestrator.loop_health.threads import prompt_switching
from perf.bench.command import Size, show
from perf.bench.schedule import DELAY_SECONDS, Measured, measure_rollouts
from perf.bench.servers import load_server
from perf.figures import Case, Figure

WORKERS = 8
BOUND = 1.2


def measure(size: Size) -> list[Case]:
    """Measures the case `env-workers`, in some 75 s; some minutes in full; 20 s when quick."""
    in_flight = size.pick(512, 4096, 4096)
    pairs, steps = size.pick(1, 2, 3), size.pick(16, 12, 16)
    without: list[Measured] = []
    within: list[Measured] = []
    with load_server(DELAY_SECONDS) as url, prompt_switching():
        for _ in range(pairs):
            without.append(uvloop.run(measure_rollouts(url, in_flight, 0, steps)))
            within.append(uvloop.run(measure_rollouts(url, in_flight, WORKERS, steps)))
    return [_case(in_flight, without, within)]


def _case(in_flight: int, without: list[Measured], within: list[Measured]) -> Case:
    def of(measured: list[Measured], value: Callable[[Measured], float]) -> float:
        return median(value(each) for each in measured)

    def cost(each: Measured) -> float:
        return 1e6 * each.cpu_seconds / each.turns

    p99, alone = of(within, lambda each: each.lag.p99), of(without, lambda each: each.lag.p99)
    ratios = tuple(each.lag.p99 / other.lag.p99 for each, other in zip(within, without, strict=True))
    return Case(
        "env-workers",
        [
            Figure("sessions", in_flight, ""),
            Figure("workers", WORKERS, ""),
            Figure("turns a second", of(within, lambda each: each.turns / each.seconds), "1/s"),
            Figure("turns a second, in the loop", of(without, lambda each: each.turns / each.seconds), "1/s"),
            Figure("CPU a turn, orchestrator", of(within, cost), "us"),
            Figure("CPU a turn, in the loop", of(without, cost), "us"),
            Figure("lag: p99", 1e3 * p99, "ms"),
            Figure("lag: max", 1e3 * of(within, lambda each: each.lag.max), "ms"),
            Figure("lag, in the loop: p99", 1e3 * alone, "ms"),
            Figure("lag, in the loop: max", 1e3 * of(without, lambda each: each.lag.max), "ms"),
            Figure("lag p99, times that in the loop", p99 / alone, "x", BOUND, rounds=ratios),
        ],
    )


if __name__ == "__main__":
    show(measure)
