"""The process that sends a job's spans to a collector: it follows the files of spans, and no role waits for it.

It speaks with its parent as `counterpoint/job/tracking/sink_process.py` does. While the collector does not answer, the spans wait
in their files, whose size is bounded; how often some were lost is counted. Lines are done once the collector has taken them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from counterpoint.job.directory import run_ids_in
from counterpoint.job.tracing.tree import Node, place
from counterpoint.job.tracking.alerts import read_headers
from counterpoint.job.tracking.follow import State
from counterpoint.job.tracking.sink_process import SinkSpec, run_under_parent
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.files.place import Place
from counterpoint.transport.files.rotated_lines import RotatedReader
from counterpoint.transport.files.untrusted import UntrustedFileError, parse_json
from counterpoint.transport.telemetry.spans import SPANS_FILE, span_in

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 500
"""Spans of one request."""

TIMEOUT_SECONDS = 10.0
"""Deadline of the collector's answer, with the library's own retries."""

LONGEST_PAUSE_SECONDS = 60.0

LAST_ATTEMPTS = 2
"""Attempts to send the rest when the job has ended."""

Send = Callable[[Sequence[Node]], bool]
"""Sends spans; returns whether the collector has taken them."""


def run(spec: SinkSpec, over: Callable[[float], bool], beat: Callable[[int], None], send: Send | None = None) -> None:
    """See `sink_process.run`."""
    directory = Path(spec.job)
    tracking = directory / "tracking"
    tracking.mkdir(exist_ok=True)
    lock = take_lock(tracking / f"{spec.name}.lock", "another process exports this job's traces; stop that one first")
    try:
        state = State(tracking / f"{spec.name}.json")
        state.save()
        _export(Spans(directory, state), send or sender(spec), over, beat, spec.poll_seconds)
    finally:
        os.close(lock)


def _export(
    spans: Spans, send: Send, over: Callable[[float], bool], beat: Callable[[int], None], poll_seconds: float
) -> None:
    sent = failures = 0
    ending = False
    while True:
        beat(sent)
        nodes = spans.next()
        if nodes and not send(nodes):
            failures += 1
            if failures == 1:
                logger.warning(
                    "the collector takes no spans; they wait in files of bounded size, and the oldest are lost first"
                )
            pause = 0.0 if ending else min(poll_seconds * 2.0**failures, LONGEST_PAUSE_SECONDS)
            while pause > 0 and not ending:
                beat(sent)
                ending = over(min(pause, 1.0))
                pause -= 1.0
            if ending and failures >= LAST_ATTEMPTS:
                logger.warning("the collector takes no spans; the newest of the job are only in its files")
                return
            continue
        if failures:
            logger.info("the collector takes spans again, after %d attempts", failures + 1)
        failures = 0
        sent += len(nodes)
        spans.done()
        if ending and not nodes:
            return
        ending = ending or over(0.0 if nodes else poll_seconds)


class Spans:
    """The spans of all files of a job that were not sent yet."""

    def __init__(self, directory: Path, state: State) -> None:
        self._directory = directory
        self._state = state
        self._tails: dict[str, RotatedReader] = {}
        self._read: list[Node] = []
        self._lost = 0

    def next(self) -> list[Node]:
        """Returns the next spans, at most `MOST_AT_ONCE`; none if there are none now."""
        if not self._read:
            self._read = [node for name, path in self._files() for node in self._nodes(name, path)]
            if (lost := sum(tail.lost for tail in self._tails.values())) > self._lost:
                self._lost = lost
                logger.warning("spans were lost %d times: a file was full twice before the collector took them", lost)
        return self._read[:MOST_AT_ONCE]

    def done(self) -> None:
        """The spans of the last `next` were sent. Raises `OSError`."""
        del self._read[:MOST_AT_ONCE]
        if not self._read:
            self._state.content["runs"] = {name: tail.place.saved() for name, tail in self._tails.items()}
            self._state.save()

    def _files(self) -> Iterator[tuple[str, Path]]:
        yield "trainer/", self._directory / "trainer" / SPANS_FILE
        for run_id in run_ids_in(self._directory):
            yield run_id, self._directory / f"run_{run_id}" / SPANS_FILE

    def _nodes(self, name: str, path: Path) -> list[Node]:
        if name not in self._tails:
            self._tails[name] = RotatedReader(path, place=Place.restored(self._state.content["runs"].get(name)))
        try:
            lines = self._tails[name].next_lines()
        except (OSError, UntrustedFileError) as error:
            logger.warning("%s cannot be read: %s", path, error)
            return []
        spans = [span for line in lines if (span := span_in(_object(line.text))) is not None and _is_name(span.run)]
        job = self._state.content["identity"]
        placed = [place(job, span, (self._directory / f"run_{span.run}" / "control").is_dir()) for span in spans]
        return [node for node in placed if node is not None]


def sender(spec: SinkSpec) -> Send:
    """Returns what sends spans to `options["endpoint"]`, by OpenTelemetry's own exporter."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs each attempt; we say it once
    headers = read_headers(spec.options.get("headers_file"))
    exporter = OTLPSpanExporter(endpoint=spec.options["endpoint"], headers=headers, timeout=TIMEOUT_SECONDS)
    scope = InstrumentationScope("counterpoint")
    resources = {
        role: Resource({"service.name": f"counterpoint-{role}", "service.namespace": spec.group})
        for role in ("orchestrator", "trainer", "inference")
    }

    def context(trace: str, span: str) -> SpanContext:
        return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def readable(node: Node) -> ReadableSpan:
        return ReadableSpan(
            name=node.name,
            context=context(node.trace, node.span),
            parent=context(node.trace, node.parent) if node.parent else None,
            resource=resources.get(node.role, resources["orchestrator"]),
            attributes=node.attributes,
            kind=SpanKind.CLIENT if node.name == "turn" else SpanKind.INTERNAL,
            instrumentation_scope=scope,
            start_time=int(node.begin * 1e9),
            end_time=int(node.end * 1e9),
        )

    def send(nodes: Sequence[Node]) -> bool:
        return exporter.export([readable(node) for node in nodes]) is SpanExportResult.SUCCESS

    return send


def _object(text: bytes) -> dict[str, Any]:
    try:
        return parse_json(text)
    except UntrustedFileError:
        return {}


def _is_name(run: str) -> bool:
    return "/" not in run and run not in (".", "..")


def main() -> None:
    """Runs the process."""
    run_under_parent(run, int(sys.argv[1]), SinkSpec.of_json(sys.argv[2]))


if __name__ == "__main__":
    main()
