"""A small run: what samples and what trains have the same weights, and the metrics are those that the rules look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perf.small_runs import FAULTS, Case, healthy, named, play

pytestmark = pytest.mark.slow


def test_the_sampler_follows_the_trainer_unless_it_is_stale(tiny_dense: Path) -> None:
    case = Case(groups=2, group_size=2, rate=1e-3, max_tokens=8)
    fresh, stale = (play(each, 4, tiny_dense) for each in (case, replace(case, stale_from=1)))
    assert [line["ess/mean"] for line in fresh] == pytest.approx([1.0] * 4, abs=1e-4)
    assert stale[-1]["ess/mean"] < fresh[-1]["ess/mean"]
    assert {"step", "length/cut", "groups/no_difference", "entropy", "grad_kept", "grad_norm"} <= fresh[0].keys()
    assert named(fresh) == {}


def test_healthy_runs_differ_and_are_the_same_again() -> None:
    assert healthy(3) == healthy(3) != healthy(4)
    assert all(case != Case() for case in FAULTS.values())
