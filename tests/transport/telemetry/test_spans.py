"""Spans reach the disk in bounded space, and read back as they were; nothing else in a file counts as one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.transport.files.json_lines import read_lines
from counterpoint.transport.telemetry import spans
from counterpoint.transport.telemetry.intervals import Interval
from counterpoint.transport.telemetry.spans import SPANS_FILE, AttributeValue, Span, SpanLog, line_of, span_in

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["role", "name", "begin", "end", "run", "step", "busy", "attributes"])


def test_spans_are_written_and_read_back(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / SPANS_FILE, "trainer")
    log.record("optimizer", 10.0, 11.0, run="one", step=3, rows=4)
    log.record_intervals("forward", [Interval(1.0, 3.0, 1.5)], run="one", step=3)
    assert not (tmp_path / SPANS_FILE).exists()
    log.flush()
    lines = [line for _, line in read_lines(tmp_path / SPANS_FILE)]
    assert lines[0] == {
        "role": "trainer", "name": "optimizer", "begin": 10.0, "end": 11.0, "run": "one", "step": 3, "attributes": {"rows": 4},
    }  # fmt: skip
    assert [span_in(line) for line in lines] == [
        Span("trainer", "optimizer", 10.0, 11.0, "one", 3, attributes={"rows": 4}),
        Span("trainer", "forward", 1.0, 3.0, "one", 3, 1.5),
    ]
    log.flush()
    assert len(list(read_lines(tmp_path / SPANS_FILE))) == 2


def test_a_measured_block_that_raises_has_its_span(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / SPANS_FILE, "orchestrator", "one")
    before = spans.now()
    with pytest.raises(KeyError), log.measure("commit", step=2):
        raise KeyError
    log.flush()
    [(_, line)] = read_lines(tmp_path / SPANS_FILE)
    span = span_in(line)
    assert span is not None
    assert (span.role, span.run, span.name, span.step) == ("orchestrator", "one", "commit", 2)
    assert before - 1e-6 <= span.begin <= span.end <= spans.now() + 1e-6


def test_space_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_BYTES", 2000)
    monkeypatch.setattr(spans, "MAX_PENDING", 10)
    log = SpanLog(tmp_path / SPANS_FILE, "trainer")
    for step in range(200):
        log.record("wait", 1.0, 2.0, step=step)
        if step % 20 == 19:  # half of these are dropped from memory, the older ones
            log.flush()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [SPANS_FILE, f"{SPANS_FILE}.1"]
    assert all(path.stat().st_size < 3000 for path in files)
    assert [line["step"] for _, line in read_lines(files[0])][-10:] == list(range(190, 200))


def test_threads_may_add_while_another_writes(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / SPANS_FILE, "trainer")

    def add() -> None:
        for step in range(300):
            log.record("wait", 1.0, 2.0, step=step)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        log.flush()
    for thread in threads:
        thread.join()
    log.flush()
    assert len(list(read_lines(tmp_path / SPANS_FILE))) == 1200


def test_what_is_added_is_cut_to_the_limits() -> None:
    attributes: dict[str, AttributeValue] = {"long": "x" * 1000, **{f"a{number}": number for number in range(50)}}
    line = line_of(Span("r" * 100, "n" * 100, 1.0, 2.0, attributes=attributes))
    assert len(line["role"]) == len(line["name"]) == spans.MAX_NAME
    assert len(line["attributes"]) == spans.MAX_ATTRIBUTES
    assert len(line["attributes"]["long"]) == spans.MAX_TEXT


@pytest.mark.slow
@given(st.dictionaries(names | st.text(max_size=3), json_values, max_size=8))
@settings(max_examples=60)
def test_any_line_is_a_span_within_the_limits_or_none(line: dict[str, object]) -> None:
    span = span_in({"role": "trainer", "name": "wait", "begin": 1.0, "end": 2.0} | line)
    if span is not None:
        assert 0 <= span.begin <= span.end
        assert 0 <= span.interval.busy <= span.end - span.begin
        assert span_in(line_of(span)) is not None


@pytest.mark.parametrize("key", ["role", "name", "begin", "end"])
def test_a_line_that_lacks_what_a_span_needs_is_none(key: str) -> None:
    line = {"role": "trainer", "name": "wait", "begin": 1.0, "end": 2.0}
    assert span_in(line) is not None
    del line[key]
    assert span_in(line) is None
