"""The policies of elastic training: what they decide of given progress, within limits, and when."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from counterpoint.cluster.elastic.progress import VARIABLE, ProgressFile, Totals, read_totals
from counterpoint.cluster.elastic.scaling import (
    Progress,
    Scaler,
    ScalingConfig,
    ScalingDecision,
    by_idle_share,
    by_throughput,
)


def halve(progress: Progress) -> int:
    """A user's policy."""
    return progress.workers // 2


def fail(progress: Progress) -> int:
    """A user's policy that fails."""
    raise RuntimeError("no idea")


def say(progress: Progress) -> str:
    """A user's policy that returns no number."""
    return "two"


def progress(workers: int, rate: float, idle_share: float = 0.0) -> Progress:
    return Progress(workers, rate, idle_share, 10.0)


@pytest.mark.parametrize(
    ("workers", "rate", "target", "wanted"),
    [
        (2, 10.0, 20.0, 4),
        (2, 10.0, 10.0, 2),
        (4, 40.0, 10.0, 2),  # one worker reaches the target exactly: that is noise
        (4, 44.0, 10.0, 1),
        (3, 0.0, 10.0, 3),  # nobody knows what a worker does
        (1, 5e-324, 1e9, 10**9),
    ],
)
def test_throughput_wants_as_few_workers_as_reach_the_target(
    workers: int, rate: float, target: float, wanted: int
) -> None:
    assert by_throughput(progress(workers, rate), target)[0] == wanted


@pytest.mark.parametrize(
    ("idle_share", "rate", "wanted"), [(0.05, 1.0, 4), (0.3, 1.0, 3), (0.6, 1.0, 2), (0.6, 0.0, 3)]
)
def test_idle_share_adds_busy_workers_and_removes_waiting_ones(idle_share: float, rate: float, wanted: int) -> None:
    assert by_idle_share(progress(3, rate, idle_share), 0.1, 0.5)[0] == wanted


@given(st.integers(1, 50), st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_throughput_rests_where_it_has_led(workers: int, rate: float, target: float) -> None:
    """If each worker does what it did before, the next decision changes nothing."""
    wanted, _ = by_throughput(progress(workers, rate), target)
    if wanted < 10**6:
        again, _ = by_throughput(progress(wanted, rate / workers * wanted), target)
        assert abs(again - wanted) <= (1 if math.isclose(rate / workers * wanted, target, rel_tol=0.06) else 0)


@given(
    st.integers(-10, 100),
    st.lists(st.tuples(st.floats(0.1, 5.0), st.integers(1, 3), st.integers(2, 5), st.booleans()), max_size=40),
)
def test_a_decision_is_within_the_limits_and_needs_a_whole_window_of_one_round(
    wanted: int, looks: list[tuple[float, int, int, bool]]
) -> None:
    scaler = Scaler(lambda _: (wanted, "asked"), 2, 5, window_seconds=4.0)
    at, begun = 0.0, 0.0
    before: tuple[int, int] | None = None
    for seconds, number, workers, trains in looks:
        at += seconds
        decision = scaler.observe(at, number, workers, Totals(at, 0.0, workers) if trains else None)
        if not trains or (number, workers) != before:
            assert decision is None
            begun, before = at, (number, workers) if trains else None
        elif decision is not None:
            assert at - begun >= 4.0
            assert 2 <= decision.wanted <= 5
            assert decision.wanted == min(max(wanted, 2), 5)
            assert decision.progress.seconds == pytest.approx(at - begun)
            assert decision.progress.rate == pytest.approx(1.0)
            begun = at
        else:
            assert at - begun < 4.0


def decided(config: ScalingConfig, totals: tuple[Totals, Totals], workers: int = 2) -> ScalingDecision:
    """The decision after ten seconds between these totals, for one to eight workers."""
    scaler = Scaler(config.make_policy(), 1, 8, 10.0, dry_run=config.dry_run)
    assert scaler.observe(0.0, 1, workers, totals[0]) is None
    decision = scaler.observe(10.0, 1, workers, totals[1])
    assert decision is not None
    assert scaler.last is decision
    return decision


def agree(progress: Progress) -> bool:
    """Says whether, and not how many."""
    return True


def test_each_decision_has_a_line_and_a_dry_run_is_no_change() -> None:
    totals = Totals(5.0, 1.0, 2), Totals(25.0, 5.0, 2)
    for dry_run in (False, True):
        decision = decided(ScalingConfig(policy="throughput", target=6.0, dry_run=dry_run), totals)
        assert (decision.wanted, decision.is_change) == (6, not dry_run)
        assert "2 -> 6 workers" in str(decision)
        assert "2/s of 6/s" in str(decision)
        assert ("(dry run)" in str(decision)) is dry_run
    idle = decided(ScalingConfig(policy="idle_share", low=0.1, high=0.15), totals)
    assert idle.progress.idle_share == pytest.approx(0.2)
    assert idle.wanted == 1


@pytest.mark.parametrize(
    ("name", "wanted", "said"),
    [("halve", 2, "halve"), ("fail", 4, "no idea"), ("say", 4, "'two'"), ("agree", 4, "True")],
)
def test_a_users_function_decides_and_its_failure_changes_nothing(name: str, wanted: int, said: str) -> None:
    decision = decided(ScalingConfig(policy=f"{__name__}:{name}"), (Totals(0, 0, 4), Totals(9, 0, 4)), workers=4)
    assert decision.wanted == wanted
    assert said in decision.reason


def test_a_limit_is_named() -> None:
    decision = decided(ScalingConfig(policy="throughput", target=1000.0), (Totals(0, 0, 2), Totals(20, 0, 2)))
    assert decision.wanted == 8
    assert "1000 is outside 1 to 8" in decision.reason


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"policy": "throughput"}, "needs a target"),
        ({"policy": "idle_share", "low": 0.5, "high": 0.5}, "not below"),
        ({"policy": "fast"}, "expected throughput, idle_share"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ScalingConfig.model_validate(values)
    with pytest.raises(AttributeError):
        ScalingConfig(policy=f"{__name__}:nobody").make_policy()
    with pytest.raises(TypeError, match="expected a function"):
        ScalingConfig(policy=f"{__name__}:VARIABLE").make_policy()


def test_the_ranks_of_a_node_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        file = ProgressFile()
        file.add(3.0)
        file.add(1.0, idle_seconds=0.5)
        with pytest.raises(ValueError, match="from 0 on"):
            file.add(-1.0)
    (tmp_path / "progress-2.json").write_text("{half")
    (tmp_path / "progress-3.json").write_text(json.dumps({"done": "inf", "idle_seconds": 0}))
    (tmp_path / "progress-4.json").write_text(json.dumps({"done": None, "idle_seconds": 0}))
    (tmp_path / "progress-5.json").write_bytes(b" " * 10**6)
    (tmp_path / "progress-6.json").write_text(json.dumps({"done": 10**400, "idle_seconds": 0}))
    assert read_totals(tmp_path) == Totals(8.0, 1.0, 2)
    assert read_totals(tmp_path / "gone") == Totals()


def test_outside_a_job_a_rank_only_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    file = ProgressFile()
    file.add(2.0, 1.0)
    assert file.totals == Totals(2.0, 1.0, 1)
