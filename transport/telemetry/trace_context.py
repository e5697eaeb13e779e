"""Ids of traces: W3C's trace context for requests, and ids that every process derives alike from job, run and step.

So the spans of a step are one trace although no message between the processes carries it. `spans.py` has the spans.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from contextvars import ContextVar

TRACE_DIGITS = 32
SPAN_DIGITS = 16

traceparent: ContextVar[str] = ContextVar("traceparent", default="")
"""The header of that name of the request that is under way in this task; empty for one that is not traced."""

_HEADER = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def step_trace(job: str, run: str, step: int) -> str:
    """Returns the trace of a step. `job` is the job's identity."""
    return _digest(f"step\n{job}\n{run}\n{step}")[:TRACE_DIGITS]


def span_in(trace: str, *parts: object) -> str:
    """Returns the id of the span that these parts name in the trace."""
    return _digest("\n".join(("span", trace, *map(str, parts))))[:SPAN_DIGITS]


def new_trace() -> str:
    """Returns a random id of a trace."""
    return secrets.token_hex(TRACE_DIGITS // 2)


def new_span() -> str:
    """Returns a random id of a span."""
    return secrets.token_hex(SPAN_DIGITS // 2)


def header(trace: str, span: str) -> str:
    """Returns the value of `traceparent` for a request that is part of this span, which is sampled."""
    return f"00-{trace}-{span}-01"


def is_header(text: str) -> bool:
    """Returns whether the text is a `traceparent` of ours: nothing else may get into a request's head."""
    return _HEADER.fullmatch(text) is not None


def is_id(text: object, digits: int) -> bool:
    """Returns whether a file's value is an id of so many hexadecimal digits, not all 0."""
    return isinstance(text, str) and re.fullmatch(rf"[0-9a-f]{{{digits}}}", text) is not None and int(text, 16) != 0


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
