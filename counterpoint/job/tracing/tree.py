"""The spans of a job as trees: a trace for each step across all processes, and those of the rollouts as they were recorded.

The ids of a step's spans follow from job, run and step. So nothing has to travel between the processes, no span waits for
another, and a span that is sent twice after a kill is the same span. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from counterpoint.transport.telemetry.spans import AttributeValue, Span
from counterpoint.transport.telemetry.trace_context import SPAN_DIGITS, TRACE_DIGITS, is_id, span_in, step_trace

STEP = "step"
"""The name of the span of a whole step, which orchestrator and trainer have each."""


@dataclass(frozen=True, slots=True)
class Node:
    """A span with its place in a trace."""

    name: str
    trace: str
    span: str
    parent: str
    """Empty for the root."""
    begin: float
    """The beginning, in Unix seconds."""
    end: float
    role: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


def place(job: str, span: Span, orchestrated: bool = True) -> Node | None:
    """Returns the span with its place; None for one that belongs to no step and to no rollout.

    The root of a step is the orchestrator's span of it; without an orchestrator it is the trainer's.
    """
    attributes = dict(span.attributes) | {"counterpoint.run": span.run}
    if is_id(span.trace, TRACE_DIGITS) and is_id(span.span, SPAN_DIGITS):
        parent = span.parent if is_id(span.parent, SPAN_DIGITS) else ""
        return Node(span.name, span.trace, span.span, parent, span.begin, span.end, span.role, attributes)
    if span.step < 1:
        return None
    attributes["counterpoint.step"] = span.step
    if span.busy is not None:
        attributes["counterpoint.busy_seconds"] = span.busy
    trace = step_trace(job, span.run, span.step)
    own, parent = _ids(trace, span, orchestrated)
    return Node(f"{span.role} {span.name}", trace, own, parent, span.begin, span.end, span.role, attributes)


def _ids(trace: str, span: Span, orchestrated: bool) -> tuple[str, str]:
    root = span_in(trace, "orchestrator", STEP)
    if span.role == "trainer":
        step = span_in(trace, "trainer", STEP)
        if span.name == STEP:
            return step, root if orchestrated else ""
        return span_in(trace, span.role, span.name, span.begin), step
    if span.role == "orchestrator" and span.name == STEP:
        return root, ""
    return span_in(trace, span.role, span.name, span.begin, *sorted(span.attributes.items())), root
