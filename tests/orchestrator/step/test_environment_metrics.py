"""Metrics of rollouts reach the step's line as means, bounded in number, name and size."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.orchestrator.rollouts.rollout_file import saved_state
from counterpoint.orchestrator.step.step_metrics import (
    MAX_ENVIRONMENT_METRICS,
    MAX_NAME,
    environment_metrics,
    step_metrics,
)
from counterpoint.orchestrator.telemetry.catalogue import ENVIRONMENT_METRIC, LINES
from counterpoint.transport.records import Rollout
from counterpoint.transport.telemetry.lines import NameTable
from tests.support.batches import make_batch
from tests.support.rollouts import make_rollout


def with_metrics(metrics: dict[Any, Any], **fields: Any) -> Rollout:
    """A rollout whose metrics were saved, as after its group was finalized."""
    rollout = make_rollout(metrics=metrics, **fields)
    rollout.saved = saved_state(rollout)
    rollout.metrics = {}
    return rollout


def test_each_metric_is_a_mean_of_the_rollouts_that_have_it() -> None:
    rollouts = [
        with_metrics({"format": 1.0, "math": 0.0}),
        with_metrics({"format": 0.0, "math": True}),
        with_metrics({"format": 0.5}, environment="other"),
        make_rollout(metrics={"math": 0.5}),
    ]
    assert environment_metrics(rollouts) == {
        "environment/toy/format/mean": 0.5,
        "environment/toy/math/mean": 0.5,
        "environment/other/format/mean": 0.5,
    }


def test_they_are_in_the_line_of_a_step_and_failed_rollouts_do_not_count() -> None:
    failed = with_metrics({"part": 9.0}, error="it broke", reward=None)
    line = step_metrics(make_batch(), [with_metrics({"part": 0.25}), failed])
    assert line["environment/toy/part/mean"] == 0.25


def test_what_is_hostile_is_bounded() -> None:
    flood = {f"metric {index}" + "x" * 200: 1.0 for index in range(200)}
    names = list(environment_metrics([make_rollout(metrics=flood)]))
    assert len(names) == MAX_ENVIRONMENT_METRICS
    assert all(len(name) <= len("environment/toy//mean") + MAX_NAME for name in names)
    assert environment_metrics([with_metrics({str(index): 1.0 for index in range(20_000)})]) == {}
    numbers = {"inf": math.inf, "nan": math.nan, "text": "1", "": 1.0, "none": None, "huge": 10**400, 5: 1.0}
    assert environment_metrics([make_rollout(metrics=numbers)]) == {}
    assert environment_metrics([with_metrics({"huge": 10**400, "long": 2**70})]) == {
        "environment/toy/long/mean": 2.0**70
    }


def test_the_mean_of_large_numbers_is_finite() -> None:
    rollouts = [make_rollout(metrics={"large": 1.5e308}) for _ in range(3)]
    assert math.isclose(environment_metrics(rollouts)["environment/toy/large/mean"], 1.5e308)


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(max_size=80), st.floats() | st.integers() | st.booleans() | st.text(max_size=3), max_size=90
    )
)
def test_every_name_has_its_row_and_every_value_is_a_number(metrics: dict[str, Any]) -> None:
    line = environment_metrics([make_rollout(metrics=metrics)])
    assert len(line) <= MAX_ENVIRONMENT_METRICS
    names = NameTable(LINES)
    for name, value in line.items():
        found = names.find(name)
        assert found is not None
        assert found[0].metric is ENVIRONMENT_METRIC
        assert found[1]["environment"] == "toy"
        assert found[1]["metric"].isascii()
        assert found[1]["metric"].isprintable()
        assert math.isfinite(value)
