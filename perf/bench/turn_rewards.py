"""Measures the step boundary of rollouts of 64 turns, without and with rewards of turns, in turns.

With them each turn has an advantage of its own, by `turn_returns`, and its record has both.

    python -m perf.bench.turn_rewards [--quick | --full]
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from counterpoint.job.replay.boundary import Recording
from counterpoint.job.replay.replay import BOUNDARY, FINALIZE, Replay, Settings, on_daemons_loop, replay
from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts
from counterpoint.orchestrator.rollouts.dump import open_dump, write_dump
from counterpoint.run.config import AdvantageConfig
from perf.bench.command import Size, show
from perf.figures import Case, Figure

TURNS = 64


def measure(size: Size) -> list[Case]:
    """Measures the case `turn-rewards`."""
    shape = Shape(size.pick(8, 32, 64), TURNS, 16_384, even=True)
    settings = Settings(baseline_seconds=size.pick(0.5, 1.0, 2.0))
    found: dict[bool, list[Replay]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        write_dump(Path(directory) / "dump", header_of(shape), synthetic_rollouts(shape))
        dump = open_dump(Path(directory) / "dump")
        dump.populate()
        rewarded = dump.header.model_copy(update={"advantage": AdvantageConfig(kind="turn_returns")})
        for _ in range(size.pick(2, 5, 8)):
            for with_rewards, recordings in found.items():
                rollouts, random = dump.rollouts(), np.random.default_rng(0)
                for rollout in rollouts if with_rewards else ():
                    rollout.turn_rewards = random.random(TURNS, dtype=np.float32)
                recording = Recording(rewarded if with_rewards else dump.header, rollouts)
                recordings.append(on_daemons_loop(partial(replay, recording, settings)))
    return [_case(found[False], found[True])]


def _case(without: list[Replay], with_rewards: list[Replay]) -> Case:
    figures = []
    for phase in (FINALIZE, BOUNDARY):
        bare, ours = (min(each.row(phase).seconds for each in found) for found in (without, with_rewards))
        figures += [
            Figure(f"{phase}: wall without rewards of turns, best round", bare, "s"),
            Figure(f"{phase}: with them over that", ours / bare, "x", 1.5),
        ]
        for name, found in (("without", without), ("with", with_rewards)):
            lag = 1e3 * min(each.row(phase).lag.max for each in found)
            figures.append(Figure(f"{phase}: lag's maximum {name} them, best round", lag, "ms"))
    return Case(f"step boundary, {TURNS} turns a rollout", figures)


if __name__ == "__main__":
    show(measure)
