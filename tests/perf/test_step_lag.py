"""What the bench `step` says of the lag that a plain boundary adds, and ours."""

from __future__ import annotations

import pytest

from counterpoint.job.replay.lag_trace import LagSpan, LagTrace
from counterpoint.job.replay.replay import BASELINE, BOUNDARY, DELIVERY, FINALIZE
from perf.bench.step import _added_over_ours

ROUND = {BASELINE: (0.0, 2.0), FINALIZE: (2.0, 2.2), BOUNDARY: (2.2, 2.5), DELIVERY: (2.5, 3.0)}


def trace_of(lags: dict[str, float]) -> LagTrace:
    """Three rounds with one sample a tenth of a second, late by what `lags` has of the phase."""
    trace = LagTrace()
    for start in (0.0, 4.0, 8.0):
        for name, (begin, end) in ROUND.items():
            trace.spans.append(LagSpan(name, start + begin, start + end))
            for sample in range(1, round((end - begin) * 10)):
                trace.times.append(start + begin + sample / 10)
                trace.lags.append(lags.get(name, 0.03))
    return trace


@pytest.mark.parametrize(
    ("ours", "plain", "times"),
    [
        (0.05, 0.43, 20.0),
        (0.05, 0.05, 1.0),  # one that is no better than ours
        (0.23, 0.43, 2.0),  # ours holds the loop as well
        (0.03, 0.43, 400.0),  # what ours adds cannot be told from nothing: a millisecond counts
    ],
)
def test_the_lag_of_the_idle_loop_is_in_neither(ours: float, plain: float, times: float) -> None:
    figure = _added_over_ours("plain", trace_of({BOUNDARY: plain}), trace_of({DELIVERY: ours}))
    assert figure.value == pytest.approx(times)
    assert len(figure.rounds) == 3
    assert figure.held is (times >= 10)
