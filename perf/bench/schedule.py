"""Measures scheduling: 1,024 rollouts in flight (4,096 in full) of 8 short turns each, against a server that answers after 50 ms.

The daemon's own scheduler, dispatcher, rollouts, step boundary and inference pool run on uvloop; in place of the trainer is one
that trains in no time. It is compared with the same rollouts written with the `openai` client, each a coroutine: token ids to
`/v1/completions` of the same server, and the answers ignored.

The p99 and the mean of its lag are compared. With 512 and 1,024 in flight its p99 varied from 50 to 209 ms in fifteen runs, as
its callbacks happened to fall together; the mean varies less, so its bound is the closer one. Ours takes four seconds where the
client takes half a minute, so one wait of the machine's decides its p99: the figures are those of the median of five rounds, in
full of three.

    python -m perf.bench.schedule [--quick | --full]
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import openai
import uvloop

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.sampling import SamplingConfig
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.job.replay.lag_trace import LagTrace
from counterpoint.run.config import RunConfig, ScheduleConfig
from counterpoint.run.loop_health.gc_tuning import (
    RolloutCounts,
    collect_as_memory_grows,
    freeze_gc,
    infrequent_gc,
)
from counterpoint.run.loop_health.lag import LagDistribution
from counterpoint.run.loop_health.threads import prompt_switching
from perf.bench.command import Size, show
from perf.bench.dispatching import run_to_the_end
from perf.bench.servers import load_server
from perf.figures import Case, Figure
from perf.short_turns import REPLY, TURNS, ShortTurns, first_prompt
from perf.stalls import Stalls, recorded_stalls

DELAY_SECONDS = 0.05
COMPLETION_TOKENS = 16
GROUP_SIZE = 8
STEPS = 16
ROUNDS, FULL_ROUNDS = 5, 3
"""Rounds of our scheduler. In full each of them is long."""
IDLE_SECONDS = 2.0
THEIR_TURNS = 1024
"""The turns of the `openai` client: with fewer, one burst of its callbacks decides its lag."""


@dataclass(frozen=True, slots=True)
class TurnsOnLoop:
    """One loop's turns, and their time."""

    turns: int
    seconds: float
    cpu_seconds: float
    """CPU seconds of the process, all its threads."""

    @property
    def cost(self) -> float:
        """CPU microseconds a turn."""
        return 1e6 * self.cpu_seconds / self.turns


@dataclass(frozen=True, slots=True)
class Measured(TurnsOnLoop):
    """The same with the lag meanwhile."""

    trace: LagTrace

    @property
    def lag(self) -> LagDistribution:
        """The distribution of its lag."""
        return self.trace.distribution()

    def less(self, stalls: Stalls) -> Measured:
        """Returns the same with the lag less the times in which the machine stood still."""
        return replace(self, trace=self.trace.less(stalls.within))


def measure(size: Size) -> list[Case]:
    """Measures the case `schedule`."""
    in_flight = size.pick(512, 1024, 4096)
    with load_server(DELAY_SECONDS) as url, prompt_switching(), recorded_stalls() as stalls:
        idle = uvloop.run(_idle())
        ours = [uvloop.run(_rollouts(url, in_flight)) for _ in range(size.pick(1, ROUNDS, FULL_ROUNDS))]
        theirs = uvloop.run(_with_openai(url, in_flight))
    case = _case(in_flight, idle.distribution(), ours, theirs)
    unstalled = _case(
        in_flight, idle.less(stalls.within).distribution(), [each.less(stalls) for each in ours], theirs.less(stalls)
    )
    return [case.beside(unstalled, stalls)]


async def _idle() -> LagTrace:
    async with LagTrace() as trace:
        await asyncio.sleep(IDLE_SECONDS)
    return trace


# --- ours ---


async def _rollouts(url: str, in_flight: int) -> Measured:
    """Plays the rollouts of `STEPS` steps."""
    with tempfile.TemporaryDirectory() as directory:
        config = run_config(Path(directory), [url], in_flight, STEPS)
        pool = InferencePool(config.inference).model(config.model)
        await pool.start()
        found = await measured(config, pool)
        await pool.release()
    return found


def run_config(directory: Path, urls: list[str], in_flight: int, steps: int) -> RunConfig:
    """Returns the configuration of a run with so many rollouts in flight, whose directory it makes."""
    config = RunConfig(
        run_id="bench",
        output_dir=directory,
        model="none",
        steps=steps,
        environments=[EnvironmentConfig(name="short", kind="perf.short_turns:ShortTurns")],
        sampling=SamplingConfig(max_tokens=COMPLETION_TOKENS),
        # With 16 steps, two thirds of them are under way at once, and the rollouts of all of them are never stale.
        schedule=ScheduleConfig(
            group_size=GROUP_SIZE,
            rollouts_per_step=in_flight // 8,
            max_inflight_rollouts=in_flight,
            max_lead_steps=steps,
            max_off_policy_steps=steps,
        ),
        inference=PoolConfig(urls=urls, max_concurrent_requests_per_server=in_flight),
    )
    config.run_dir.mkdir()
    return config


async def measured(config: RunConfig, pool: Served) -> Measured:
    """Plays the steps of a run."""
    with infrequent_gc():
        freeze_gc()
        counts = RolloutCounts()
        collecting = asyncio.create_task(collect_as_memory_grows(counts))
        started, cpu_started = time.perf_counter(), time.process_time()
        async with LagTrace() as trace:
            await run_to_the_end(config, pool, ShortTurns(), counts)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        collecting.cancel()
    return Measured(config.steps * config.schedule.rollouts_per_step * TURNS, seconds, cpu_seconds, trace)


# --- with the openai client ---


async def _with_openai(url: str, in_flight: int) -> Measured:
    """Runs as many rollouts at once until each has done a turn, which connects, and then measures `THEIR_TURNS`."""
    # Without limits of its own for connections, the client would let a thousand requests through at a time.
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=in_flight, max_keepalive_connections=in_flight)
    http_client = openai.DefaultAsyncHttpxClient(limits=limits)
    done = 0
    connected, enough = asyncio.Event(), asyncio.Event()

    async def rollout(index: int) -> None:
        nonlocal done
        prompt = first_prompt(index)
        for _ in range(TURNS):
            answer = await client.completions.create(
                model="none",
                prompt=prompt,
                max_tokens=COMPLETION_TOKENS,
                temperature=1.0,
                logprobs=0,
                extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True, "stop_token_ids": [2]},
            )
            completion = (answer.choices[0].model_extra or {})["token_ids"]
            prompt = [*prompt, *completion, *REPLY]
            done += 1
            if done == in_flight:
                connected.set()
            if done >= in_flight + THEIR_TURNS:
                enough.set()

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http_client, timeout=600
    ) as client:
        tasks = [asyncio.create_task(rollout(index)) for index in range(in_flight)]
        await connected.wait()
        with infrequent_gc():
            freeze_gc()
            async with LagTrace() as trace:
                before, started, cpu_started = done, time.perf_counter(), time.process_time()
                await enough.wait()
                turns, seconds, cpu_seconds = (
                    done - before,
                    time.perf_counter() - started,
                    time.process_time() - cpu_started,
                )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Measured(turns, seconds, cpu_seconds, trace)


def _case(in_flight: int, idle: LagDistribution, ours: Sequence[Measured], theirs: Measured) -> Case:
    their_lag = theirs.lag
    means, p99s = ([getattr(each.lag, name) for each in ours] for name in ("mean", "p99"))
    cost, mean, p99 = statistics.median(each.cost for each in ours), statistics.median(means), statistics.median(p99s)
    return Case(
        "schedule",
        [
            Figure("rollouts in flight", in_flight, ""),
            Figure("turns", ours[0].turns, ""),
            Figure("rounds", len(ours), ""),
            Figure("turns a second", statistics.median(each.turns / each.seconds for each in ours), "1/s"),
            Figure("turns a second, openai client", theirs.turns / theirs.seconds, "1/s"),
            Figure("CPU a turn", cost, "us"),
            Figure("CPU a turn, openai client", theirs.cost, "us"),
            Figure("CPU a turn, times less than the openai client", theirs.cost / cost, "", 3.0, "at least"),
            Figure("lag, idle: p99", 1e3 * idle.p99, "ms"),
            Figure("lag, idle: max", 1e3 * idle.max, "ms"),
            Figure("lag: mean", 1e3 * mean, "ms"),
            Figure(
                "lag: p99", 1e3 * p99, "ms", 10.0, idle_share=idle.p99 / p99, rounds=tuple(1e3 * lag for lag in p99s)
            ),
            Figure("lag: max of all rounds", 1e3 * max(each.lag.max for each in ours), "ms"),
            Figure("lag, openai client: mean", 1e3 * their_lag.mean, "ms"),
            Figure("lag, openai client: p99", 1e3 * their_lag.p99, "ms"),
            Figure("lag, openai client: max", 1e3 * their_lag.max, "ms"),
            Figure(
                "mean lag, times less than the openai client's",
                their_lag.mean / mean,
                "x",
                30.0,
                "at least",
                slack=6.0,
                idle_share=idle.mean / mean,
                rounds=tuple(their_lag.mean / lag for lag in means),
            ),
            Figure(
                "lag p99, times less than the openai client's",
                their_lag.p99 / p99,
                "x",
                30.0,
                "at least",
                idle_share=idle.p99 / p99,
                rounds=tuple(their_lag.p99 / lag for lag in p99s),
            ),
        ],
    )


if __name__ == "__main__":
    show(measure)
