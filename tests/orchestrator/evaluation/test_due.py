"""What is due as versions come, and what is skipped."""

from __future__ import annotations

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.orchestrator.evaluation.due import DueEvaluations
from counterpoint.run.evaluations import EvaluationConfig


def due(
    *intervals: int, at_start: bool = True, begun: int = 0, steps: int = 20, done: dict[str, int] | None = None
) -> DueEvaluations:
    environment = EnvironmentConfig(name="words", kind="reverse-text")
    evaluations = [
        EvaluationConfig(name=f"every-{interval}", environments=[environment], interval=interval, at_start=at_start)
        for interval in intervals
    ]
    return DueEvaluations(evaluations, begun, steps, done or {})


def test_first_multiples_and_last() -> None:
    evaluations = due(8)
    begun = []
    for version in range(21):
        evaluations.version_loaded(version)
        while (each := evaluations.next()) is not None:
            begun.append(each[1])
    assert begun == [0, 8, 16, 20]
    assert evaluations.all_begun


def test_a_branch_may_leave_out_the_version_that_it_begins_with() -> None:
    evaluations = due(5, at_start=False, begun=5, steps=12)
    found = [version for version in range(5, 13) if evaluations.version_loaded(version)]
    assert found == [10, 12]
    resumed = due(5, at_start=False, begun=5, steps=12)
    assert resumed.version_loaded(11), "a process that begins later does not leave out what was due meanwhile"


def test_a_version_that_passes_a_multiple_is_due_once() -> None:
    evaluations = due(5, done={"every-5": 4})
    assert evaluations.version_loaded(7) == [("every-5", None)]
    assert evaluations.next() == ("every-5", 7)
    assert evaluations.version_loaded(9) == []
    assert evaluations.version_loaded(10) == [("every-5", None)]


def test_an_evaluation_that_has_not_begun_is_skipped_for_a_newer_version() -> None:
    evaluations = due(1, 10)
    evaluations.version_loaded(0)
    assert evaluations.next() == ("every-1", 0)
    assert evaluations.version_loaded(1) == [("every-1", None)]
    assert evaluations.version_loaded(2) == [("every-1", 1)]
    assert evaluations.next() == ("every-10", 0)
    assert evaluations.next() == ("every-1", 2)
    assert evaluations.next() is None


def test_the_last_version_is_due_although_no_interval_has_passed() -> None:
    evaluations = due(100, done={"every-100": 0})
    assert not evaluations.all_begun
    evaluations.version_loaded(20)
    assert not evaluations.all_begun
    assert evaluations.next() == ("every-100", 20)
    assert evaluations.all_begun


def test_an_interrupted_evaluation_waits_again_and_is_not_due_twice() -> None:
    evaluations = due(5, done={"every-5": 5})
    evaluations.wait_again("every-5", 10)
    assert evaluations.version_loaded(12) == []
    assert evaluations.next() == ("every-5", 10)


def test_without_evaluations_nothing_is_awaited() -> None:
    assert due().all_begun
