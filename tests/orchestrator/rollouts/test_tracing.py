"""The trace of a rollout: its spans, the header of its requests, and that nothing else is traced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from counterpoint.orchestrator.rollouts.tracing import RolloutTracing
from counterpoint.transport.records import Rollout
from counterpoint.transport.telemetry.spans import Span, SpanLog
from counterpoint.transport.telemetry.trace_context import header, is_header, traceparent


def traced(tmp_path: Path, share: float) -> tuple[RolloutTracing, list[Span], SpanLog]:
    spans, taken = SpanLog(tmp_path / "spans.jsonl", "orchestrator", "a"), list[Span]()
    spans.sinks.append(taken.extend)
    return RolloutTracing(spans, "a", share), taken, spans


def rollout() -> Rollout:
    return Rollout(rollout_id="7", group_id=3, environment="e", example_index=0)


async def test_overlapping_turns_are_no_time_of_the_environment(tmp_path: Path) -> None:
    tracing, taken, spans = traced(tmp_path, 1.0)
    trace = tracing.begin(rollout())
    assert trace is not None
    seen: list[str] = []

    async def call() -> None:
        with trace.turn():
            await asyncio.sleep(0)
            seen.append(traceparent.get())

    with trace.playing():
        await asyncio.gather(call(), call())
    with pytest.raises(ValueError, match="x"), trace.turn():
        raise ValueError("x")
    trace.end()
    spans.flush()
    names = [span.name for span in taken]
    assert names == ["environment", "turn", "turn", "environment", "turn", "rollout"]
    assert [span.attributes["failed"] for span in taken if span.name == "turn"] == [False, False, True]
    turns = {header(span.trace, span.span) for span in taken if span.name == "turn"}
    assert set(seen) < turns
    assert all(map(is_header, seen))
    assert traceparent.get() == ""
    (root,) = (span for span in taken if not span.parent)
    assert {span.parent for span in taken if span is not root} == {root.span}


def test_a_share_of_the_rollouts_is_traced(tmp_path: Path) -> None:
    assert traced(tmp_path, 0.0)[0].begin(rollout()) is None
    half = traced(tmp_path, 0.5)[0]
    assert 300 < sum(half.begin(rollout()) is not None for _ in range(1000)) < 700
