"""The spans of a real run agree with its metrics, and `fleet.json` says what its servers do; the disk costs only the files."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.orchestrator.activity import FLEET_FILE, Rates, RunActivity
from counterpoint.orchestrator.daemon import run
from counterpoint.run.config import RunConfig
from counterpoint.transport.files.json_lines import read_lines
from counterpoint.transport.telemetry.intervals import busy_seconds
from counterpoint.transport.telemetry.spans import SPANS_FILE, Span, span_in
from tests.orchestrator.daemons import STEPS, metrics_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.fake_inference import FakeInference


class Servers:
    """One server, which has answered nothing."""

    def __init__(self, **totals: Any) -> None:
        empty = {"requests": 0, "completion_tokens": 0, "cached_tokens": 0, "cacheable_tokens": 0}
        self.server: dict[str, Any] = {"url": "http://a"} | empty | totals

    def take_spans(self, run: str, step: int) -> list[Span]:
        return [Span("inference", "serve", 1.0, 2.0, run, step)]

    def fleet(self) -> dict[str, Any]:
        return {"waiting": 0, "servers": [dict(self.server)]}


@pytest.mark.slow
def test_the_spans_of_a_run_agree_with_its_metrics(
    make_config: Callable[..., RunConfig], inference: FakeInference
) -> None:
    config = make_config()
    with ScriptedTrainer(config.output_dir, "one", STEPS, train_seconds=0.1):
        assert run(config, lambda: None) == 0
    by_step: defaultdict[int, defaultdict[tuple[str, str], list[Span]]] = defaultdict(lambda: defaultdict(list))
    for _, line in read_lines(config.run_dir / SPANS_FILE):
        span = span_in(line)
        assert span is not None
        assert span.run == "one"
        by_step[span.step][span.role, span.name].append(span)
    ended = 0.0
    for line in metrics_of(config):
        spans = by_step[line["step"]]
        phases = {key.removeprefix("phase/"): value for key, value in line.items() if key.startswith("phase/")}
        for phase, seconds in phases.items():
            spent = sum(span.interval.busy for span in spans["orchestrator", phase])
            assert spent == pytest.approx(seconds, abs=1e-4)
        [whole] = spans["orchestrator", "step"]
        assert whole.end - whole.begin == pytest.approx(line["wall_seconds"], abs=1e-4)
        assert whole.begin == pytest.approx(ended, abs=1e-4) or not ended, "a step begins when the one before it ends"
        ended = whole.end
        assert whole.attributes["samples"] == line["batch/samples"]
        [delivered] = spans["orchestrator", "deliver"]
        assert delivered.begin < whole.end < delivered.end + 60
        served = spans["inference", "serve"]
        assert {span.attributes["server"] for span in served} <= {inference.url}
    everything = [span for spans in by_step.values() for span in spans["inference", "serve"]]
    assert busy_seconds((span.interval for span in everything), 0.0, ended) > 0
    assert {span.attributes["version"] for spans in by_step.values() for span in spans["inference", "load"]}
    fleet = orjson.loads((config.run_dir / FLEET_FILE).read_bytes())
    assert (fleet["run"], fleet["step"], fleet["ended"]) == ("one", STEPS, True)
    [server] = fleet["servers"]
    assert server["url"] == inference.url
    assert server["requests"] >= STEPS * config.schedule.rollouts_per_step


async def test_a_disk_that_fails_costs_only_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    activity = RunActivity(tmp_path / "gone", "one")
    activity.observe(Servers(), 3)
    activity.end_step({"step": 4}, {})
    await activity.close()
    assert caplog.text.count("cannot be written") == 2, "one line of each file"


async def test_a_value_that_is_no_json_costs_only_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    activity = RunActivity(tmp_path, "one")
    activity.observe(Servers(requests=1 << 70), 3)
    await activity.close()
    assert "cannot be written" in caplog.text
    assert not (tmp_path / FLEET_FILE).exists()


async def test_what_is_written_late_does_not_replace_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.orchestrator.activity.PUBLISH_SECONDS", 0.001)
    activity = RunActivity(tmp_path, "one")
    activity.observe(Servers(), 3)
    publishing = asyncio.create_task(activity.run())
    async with asyncio.timeout(60):
        while not (tmp_path / FLEET_FILE).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await activity.close()
        await asyncio.sleep(0.02)
    publishing.cancel()
    assert orjson.loads((tmp_path / FLEET_FILE).read_bytes())["ended"]


def test_rates_are_of_the_last_half_minute() -> None:
    rates = Rates()
    server: dict[str, Any] = {}
    for second in range(100):
        totals = {"requests": 2 * second, "completion_tokens": 100 * second}
        server = {"url": "http://a", "cached_tokens": 3 * second, "cacheable_tokens": 4 * second} | totals
        rates.add_to([server], float(second))
        if not second:
            assert server["requests_per_second"] is server["cache_hit_share"] is None
    assert server["requests_per_second"] == pytest.approx(2.0)
    assert server["tokens_per_second"] == pytest.approx(100.0)
    assert server["cache_hit_share"] == pytest.approx(0.75)
    assert len(rates._seen) < 40
