"""Measures what an evaluation takes from training: rollouts a second of training beside an evaluation, and without one.

The daemon's scheduler, dispatcher, evaluations and inference pool run against a server that answers after 50 ms, as in
`perf/bench/schedule.py`. Both are measured in turns. The evaluation outlasts the training.

    python -m perf.bench.evaluation [--quick | --full]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import cast

import uvloop

from environments.chat import Chat
from environments.config import EnvironmentConfig
from environments.sampling import SamplingConfig
from inference.base import SamplingParameters
from inference.config import PoolConfig
from inference.pool.pool import InferencePool
from orchestrator.dispatcher import Dispatcher
from orchestrator.evaluation.evaluations import Evaluations
from orchestrator.evaluation.loading import LoadedEvaluation
from orchestrator.loop_health.gc_tuning import RolloutCounts, infrequent_gc
from orchestrator.loop_health.threads import prompt_switching
from orchestrator.rollouts.play import LoadedEnvironment
from perf.bench.command import Size, show
from perf.bench.dispatching import NoTokenizer, run_to_the_end
from perf.bench.schedule import COMPLETION_TOKENS, DELAY_SECONDS
from perf.bench.servers import load_server
from perf.figures import Case, Figure
from perf.short_turns import ShortTurns
from run.config import RunConfig, ScheduleConfig
from run.evaluations import EvaluationConfig

SHARE = 0.2
MARGIN = 0.1
"""The share that is left for the last steps, whose rollouts the evaluation slows down once no further ones start, and for
chance."""

GROUP_SIZE = 8


def measure(size: Size) -> list[Case]:
    """Measures the case `evaluation`, in some 40 s; 15 s when quick."""
    in_flight, rounds = size.pick(64, 128, 1024), size.pick(1, 2, 2)
    steps = size.pick(40, 64, 64)  # many times what is in flight, or the beginning and the end would count
    alone, beside = 0.0, 0.0
    with load_server(DELAY_SECONDS) as url, prompt_switching(), infrequent_gc():
        uvloop.run(_seconds(url, in_flight, 2, evaluated=True))  # everything is imported and connected once
        for _ in range(rounds):
            alone += uvloop.run(_seconds(url, in_flight, steps, evaluated=False))
            beside += uvloop.run(_seconds(url, in_flight, steps, evaluated=True))
    rollouts = rounds * steps * _rollouts_per_step(in_flight)
    return [
        Case(
            "evaluation",
            [
                Figure("rollouts in flight", in_flight, ""),
                Figure("training rollouts a second", rollouts / alone, "1/s"),
                Figure("training rollouts a second, beside an evaluation", rollouts / beside, "1/s"),
                Figure("share of training's throughput kept", alone / beside, "", 1 - SHARE - MARGIN, "at least", 1.4),
            ],
        )
    ]


def _rollouts_per_step(in_flight: int) -> int:
    return in_flight // 4


async def _seconds(url: str, in_flight: int, steps: int, *, evaluated: bool) -> float:
    """Returns how long the steps of a run take."""
    environment = EnvironmentConfig(name="short", kind="perf.short_turns:ShortTurns")
    with tempfile.TemporaryDirectory() as directory:
        config = RunConfig(
            run_id="bench",
            output_dir=Path(directory),
            model="none",
            steps=steps,
            environments=[environment],
            sampling=SamplingConfig(max_tokens=COMPLETION_TOKENS),
            schedule=ScheduleConfig(
                group_size=GROUP_SIZE,
                rollouts_per_step=_rollouts_per_step(in_flight),
                max_inflight_rollouts=in_flight,
                max_lead_steps=steps,
                max_off_policy_steps=steps,
            ),
            evaluations=[EvaluationConfig(name="endless", environments=[environment], share=SHARE)]
            if evaluated
            else [],
            inference=PoolConfig(urls=[url], max_concurrent_requests_per_server=in_flight, capacity="fixed"),
        )
        config.run_dir.mkdir()
        pool = InferencePool(config.inference, config.model)
        await pool.start()

        def evaluations_of(dispatcher: Dispatcher) -> Evaluations:
            return Evaluations(
                config,
                [_endless(config, 2 * steps * config.schedule.rollouts_per_step)],
                pool,
                handle=dispatcher.handle,
                publish=lambda metrics: None,
                on_progress=lambda: None,
            )

        started = time.perf_counter()
        await run_to_the_end(config, pool, ShortTurns(), RolloutCounts(), evaluations_of if evaluated else None)
        seconds = time.perf_counter() - started
        await pool.close()
    return seconds


def _endless(config: RunConfig, rollouts: int) -> LoadedEvaluation:
    """Returns an evaluation that has more rollouts than the training."""
    (evaluation,) = config.evaluations
    (environment,) = evaluation.environments
    sampling = SamplingParameters(temperature=1.0, max_tokens=COMPLETION_TOKENS, stop_token_ids=(2,))
    return LoadedEvaluation(
        evaluation,
        {environment.name: LoadedEnvironment(environment, ShortTurns())},
        {environment.name: (cast(Chat, NoTokenizer()), sampling)},
        {environment.name: config.sampling},
        [(environment.name, index) for index in range(rollouts)],
    )


if __name__ == "__main__":
    show(measure)
