"""What a run shows to Prometheus: the newest step, sums since the start, and what the loop notes of its servers."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from counterpoint.inference.base import ServerStatus
from counterpoint.inference.pool.meters import PoolMeters
from counterpoint.orchestrator.telemetry.endpoint import RunTelemetry
from counterpoint.run.config import LagConfig, RunConfig
from counterpoint.run.loop_health.lag import EventLoopLagMonitor
from counterpoint.transport.outages import OutageKind, Outages


def samples(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples of an exposition by name and by the values of their labels, the run aside."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "one"
            found.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return found


def test_lines_become_gauges_counters_and_histograms(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    with RunTelemetry(config, EventLoopLagMonitor(LagConfig())) as telemetry:
        assert (config.output_dir / "prometheus" / "orchestrator_one.json").exists()
        telemetry.publish({"step": 1, "rollouts/completed": 8, "phase/merge": 0.02, "reward/gone/mean": 1.0})
        telemetry.publish_lasting({"evaluation/test/pass@1": 0.5, "evaluation/test/pass@1/low": 0.25})
        telemetry.publish(
            {
                "step": 2,
                "reward/mean": 0.5,
                "rollouts/completed": 9,
                "phase/merge": 0.2,
                "environment/toy/a.b/mean": 0.5,
                "environment/toy/a_b/mean": 0.25,
                "failures/toy/the reward is 'x/y'": 2,
                "event_loop_blame": [{"kind": "gil"}],
                "a number/of somebody else": 3,
            }
        )
        found = samples(telemetry.port)
    assert found["counterpoint_step"] == {(): 2}
    assert found["counterpoint_reward_mean"] == {(): 0.5}
    assert found["counterpoint_rollouts_total"] == {("completed",): 17}
    assert found["counterpoint_rollout_failures_total"] == {("toy", "the reward is 'x/y'"): 2}
    assert found["counterpoint_environment_metric_mean"] == {("toy", "a.b"): 0.5, ("toy", "a_b"): 0.25}
    assert found["counterpoint_phase_seconds_count"] == {("merge",): 2}
    assert found["counterpoint_phase_seconds_bucket"]["0.05", "merge"] == 1
    assert found["counterpoint_evaluation_score"] == {("test", "pass@1"): 0.5}
    assert found["counterpoint_evaluation_score_low"] == {("test", "pass@1"): 0.25}
    assert "counterpoint_environment_reward_mean" not in found
    assert not any("somebody" in name for name in found)
    assert not list((config.output_dir / "prometheus").iterdir())


class Pool:
    """A pool of two servers."""

    def __init__(self) -> None:
        self.meters = PoolMeters()
        self.waiting_requests = 3

    def status(self) -> list[ServerStatus]:
        return [
            ServerStatus("http://a", "serving", "", 4, 7, 32),
            ServerStatus("http://b", "out", "it fails", None, 0, 32),
        ]


def test_servers_are_as_the_loop_noted_them(make_config: Callable[..., RunConfig]) -> None:
    pool: Any = Pool()
    outages = Outages()
    outages.begin(OutageKind.TRAINER, "the trainer at x", "is not connected", "it left", since=1234.5)
    scheduler: Any = SimpleNamespace(
        snapshot=lambda: SimpleNamespace(capacity=32, in_flight_rollouts=7, evaluation_rollouts=1, paused=False)
    )

    async def watched() -> dict[str, dict[tuple[str, ...], float]]:
        with RunTelemetry(make_config(), EventLoopLagMonitor(LagConfig())) as telemetry:
            watching = asyncio.create_task(telemetry.watch(pool, scheduler, outages))
            await asyncio.sleep(0)
            pool.meters.turn_seconds.observe(0.0)
            pool.meters.retries += 2
            found = await asyncio.to_thread(samples, telemetry.port)
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            return found

    found = asyncio.run(watched())
    states = found["counterpoint_inference_servers"]
    assert states == {("unknown",): 0, ("loading",): 0, ("serving",): 1, ("draining",): 0, ("out",): 1}
    assert found["counterpoint_inference_server_version"] == {("http://a",): 4}
    assert found["counterpoint_inference_server_requests"] == {("http://a",): 7, ("http://b",): 0}
    assert found["counterpoint_outage_start_timestamp_seconds"] == {("trainer", "the trainer at x"): 1234.5}
    assert found["counterpoint_inference_waiting_requests"] == {(): 3}
    assert found["counterpoint_inference_retries_total"] == {(): 2}
    assert found["counterpoint_turn_seconds_count"] == {(): 1}
    assert 0 <= found["counterpoint_event_loop_silent_seconds"][()] < 60
    assert found["counterpoint_inflight_rollouts"] == {("training",): 7, ("evaluation",): 1}


def test_every_sample_of_the_lag_is_in_its_histogram() -> None:
    async def blocked() -> EventLoopLagMonitor:
        monitor = EventLoopLagMonitor(LagConfig(interval_seconds=0.01))
        sampling = asyncio.create_task(monitor.run())
        while sum(monitor.histogram.counts) < 3:  # noqa: ASYNC110 - the monitor's own pace
            await asyncio.sleep(0.01)
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
        return monitor

    monitor = asyncio.run(blocked())
    assert sum(monitor.histogram.counts) == monitor.take().n
