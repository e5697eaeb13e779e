"""The trace of one rollout in some hundred: its turns, the time of its environment between them, and its scoring.

Each turn's request carries W3C's `traceparent`, so that the spans of the server that answers it join the trace. The spans are
written with the run's others; `counterpoint/job/tracing` exports them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from counterpoint.transport.records import Rollout
from counterpoint.transport.telemetry.spans import AttributeValue, Span, SpanLog, now
from counterpoint.transport.telemetry.trace_context import header, new_span, new_trace, traceparent


class RolloutTracing:
    """Chooses the rollouts that are traced. For the event loop."""

    def __init__(self, spans: SpanLog, run_id: str, share: float) -> None:
        """`share` of the rollouts are traced."""
        self._spans = spans
        self._run_id = run_id
        self._share = share
        self._random = random.Random()  # not the run's: what is traced must not change what is trained

    def begin(self, rollout: Rollout) -> RolloutTrace | None:
        """Returns the trace of a rollout that begins; None if it is not traced."""
        return RolloutTrace(self._spans, self._run_id, rollout) if self._random.random() < self._share else None


class RolloutTrace:
    """One rollout's trace."""

    def __init__(self, spans: SpanLog, run_id: str, rollout: Rollout) -> None:
        self._spans = spans
        self._run_id = run_id
        self._rollout = rollout
        self._trace, self._root = new_trace(), new_span()
        self._began = now()
        self._calls = 0
        """The number of calls in flight."""
        self._playing_since: float | None = None
        """The time when the environment's own work began; None while it waits for a call, or is done."""

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Around the environment's play: what is not a turn in it is its own time."""
        self._playing_since = now()
        try:
            yield
        finally:
            self._end_environment()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a call of the model."""
        self._end_environment()
        self._calls += 1
        span, began = new_span(), now()
        token = traceparent.set(header(self._trace, span))
        failed = True
        try:
            yield
            failed = False
        finally:
            traceparent.reset(token)
            self._calls -= 1
            self._playing_since = None if self._calls else now()
            self._add("turn", began, now(), span=span, failed=failed)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Around the environment's score."""
        began = now()
        try:
            yield
        finally:
            self._add("score", began, now())

    def end(self) -> None:
        """Adds the rollout's own span."""
        rollout = self._rollout
        self._add(
            "rollout",
            self._began,
            now(),
            span=self._root,
            parent="",
            rollout=rollout.rollout_id,
            group=rollout.group_id,
            environment=rollout.environment,
            turns=len(rollout.turns),
            failed=rollout.error is not None,
        )

    def _end_environment(self) -> None:
        if self._playing_since is not None:
            self._add("environment", self._playing_since, now())
            self._playing_since = None

    def _add(
        self,
        name: str,
        begin: float,
        end: float,
        span: str = "",
        parent: str | None = None,
        **attributes: AttributeValue,
    ) -> None:
        parent = self._root if parent is None else parent
        own = span or new_span()
        self._spans.add(
            Span(
                "orchestrator",
                name,
                begin,
                end,
                self._run_id,
                trace=self._trace,
                span=own,
                parent=parent,
                attributes=attributes,
            )
        )
