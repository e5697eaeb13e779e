"""Traces at a collector: one tree for a step across processes, one for a rollout; and a collector that fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from counterpoint.job.tracing import export_process
from counterpoint.job.tracing.tree import Node, place
from counterpoint.job.tracking.alerts import read_headers
from counterpoint.job.tracking.sink_process import SinkSpec
from counterpoint.transport.process.launch import guarded
from counterpoint.transport.telemetry.spans import Span, SpanLog

ORCHESTRATOR = """
import asyncio, sys
from pathlib import Path
from counterpoint.orchestrator.rollouts.tracing import RolloutTracing
from counterpoint.transport.records import Rollout
from counterpoint.transport.telemetry.spans import Span, SpanLog
from counterpoint.transport.telemetry.trace_context import traceparent
spans = SpanLog(Path(sys.argv[1]) / "run_a" / "spans.jsonl", "orchestrator", "a")
for step in (1, 2):
    spans.record("step", 10.0 * step, 10.0 * step + 5, step=step, rollouts=4)
    spans.record("merge", 10.0 * step + 1, 10.0 * step + 2, step=step)
    spans.record("load", 10.0 * step + 6, 10.0 * step + 7, step=step, role="inference", server="http://x")
trace = RolloutTracing(spans, "a", 1.0).begin(Rollout(rollout_id="7", group_id=3, environment="e", example_index=0))
with trace.playing():
    for _ in range(2):
        with trace.turn():
            assert traceparent.get().endswith("-01")
        assert not traceparent.get()
with trace.scoring():
    pass
trace.end()
spans.flush()
"""

TRAINER = """
import sys
from pathlib import Path
from counterpoint.transport.telemetry.spans import SpanLog
spans = SpanLog(Path(sys.argv[1]) / "trainer" / "spans.jsonl", "trainer")
for step in (1, 2):
    spans.record("step", 10.0 * step + 5, 10.0 * step + 9, step=step, run="a")
    spans.record("forward_backward", 10.0 * step + 5, 10.0 * step + 8, step=step, run="a")
    spans.record("broadcast", 10.0 * step + 8, 10.0 * step + 9, step=step, run="a")
spans.flush()
"""


class Collector:
    """Receives OTLP over HTTP, as a real one does."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[str, str, str, str]] = {}
        """By id: name, trace, parent, service."""
        self.headers: list[str] = []
        self.failures = 1

    async def take(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = await request.read()
        self.headers.append(request.headers.get("X-Key", ""))
        if self.failures:
            self.failures -= 1
            return web.Response(status=400)
        message = ExportTraceServiceRequest()
        message.ParseFromString(body)
        for resource in message.resource_spans:
            attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    own, parent = span.span_id.hex(), span.parent_span_id.hex()
                    self.spans[own] = (span.name, span.trace_id.hex(), parent, attributes["service.name"])
        return web.Response(body=b"", content_type="application/x-protobuf")

    def tree(self) -> set[tuple[str, str]]:
        """Every span's name and its parent's, empty for a root's; a parent of another trace would be missing."""
        return {
            (name, self.spans[parent][0] if parent and self.spans[parent][1] == trace else parent)
            for name, trace, parent, _ in self.spans.values()
        }


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "run_a" / "control").mkdir(parents=True)
    (tmp_path / "trainer").mkdir()
    return tmp_path


@pytest.mark.slow
async def test_the_spans_of_all_processes_are_one_tree_at_the_collector(job: Path) -> None:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    headers = job / "headers"
    headers.write_text("X-Key: secret\n")
    headers.chmod(0o600)
    options = {"endpoint": f"http://127.0.0.1:{port}/v1/traces", "headers_file": str(headers)}
    spec = SinkSpec(
        "otel", "", str(job), "job", options, poll_seconds=0.02, program="counterpoint.job.tracing.export_process"
    )
    beats, given = os.pipe()
    command = [sys.executable, "-m", spec.program, str(given), spec.to_json()]
    process = subprocess.Popen(guarded(command), pass_fds=(given,), stdin=subprocess.PIPE)  # noqa: ASYNC220
    os.close(given)
    try:
        for script in (ORCHESTRATOR, TRAINER):
            role = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(job))
            assert await role.wait() == 0
        async with asyncio.timeout(60):
            while len(collector.spans) < 18:  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.02)
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGHUP)
            process.wait()
        os.close(beats)
        await runner.cleanup()
    assert collector.tree() == {
        ("orchestrator step", ""),
        ("orchestrator merge", "orchestrator step"),
        ("inference load", "orchestrator step"),
        ("trainer step", "orchestrator step"),
        ("trainer forward_backward", "trainer step"),
        ("trainer broadcast", "trainer step"),
        ("rollout", ""),
        ("turn", "rollout"),
        ("environment", "rollout"),
        ("score", "rollout"),
    }
    assert len({trace for name, trace, _, _ in collector.spans.values() if "step" in name}) == 2
    assert {service for *_, service in collector.spans.values()} == {
        "counterpoint-orchestrator",
        "counterpoint-trainer",
        "counterpoint-inference",
    }
    assert set(collector.headers) == {"secret"}


def test_while_the_collector_fails_spans_wait_and_then_come_once_and_in_order(job: Path) -> None:
    spans = SpanLog(job / "trainer" / "spans.jsonl", "trainer")
    taken: list[str] = []
    answers: Iterator[bool] = iter([False, False, True, True, True])
    beats: list[int] = []

    def send(nodes: Sequence[Node]) -> bool:
        if not (taking := next(answers)):
            spans.record("late", 3.0, 4.0, step=2, run="a")
            spans.flush()
            return taking
        taken.extend(node.name for node in nodes)
        return taking

    spans.record("step", 1.0, 2.0, step=1, run="a")
    spans.flush()
    spec = SinkSpec("otel", "", str(job), "job", poll_seconds=0.001)
    export_process.run(spec, lambda seconds: len(taken) >= 3, beats.append, send)
    assert taken == ["trainer step", "trainer late", "trainer late"]
    assert len(beats) > 3
    export_process.run(spec, lambda seconds: True, beats.append, send)
    assert len(taken) == 3, "what the collector has taken is not sent again"


def test_a_job_ends_although_the_collector_takes_nothing(job: Path) -> None:
    spans = SpanLog(job / "trainer" / "spans.jsonl", "trainer")
    spans.record("step", 1.0, 2.0, step=1, run="a")
    spans.flush()
    spec = SinkSpec("otel", "", str(job), "job", poll_seconds=0.001)
    export_process.run(spec, lambda seconds: True, lambda sent: None, lambda nodes: False)
    taken: list[str] = []

    def send(nodes: Sequence[Node]) -> bool:
        taken.extend(node.name for node in nodes)
        return True

    export_process.run(spec, lambda seconds: True, lambda sent: None, send)
    assert taken == ["trainer step"]


def test_a_step_without_an_orchestrator_is_rooted_in_the_trainer() -> None:
    node = place("job", Span("trainer", "step", 1.0, 2.0, "a", 1), orchestrated=False)
    assert node is not None
    assert node.parent == ""
    assert place("job", Span("trainer", "idle", 1.0, 2.0)) is None


def test_headers_are_kept_from_others_and_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("Authorization: Bearer abc\n")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="mode 0600"):
        read_headers(str(file))
    file.chmod(0o600)
    assert read_headers(str(file)) == {"Authorization": "Bearer abc"}
    file.write_text("secretsecret\n")
    with pytest.raises(ValueError, match="line 1") as caught:
        read_headers(str(file))
    assert "secretsecret" not in str(caught.value)
