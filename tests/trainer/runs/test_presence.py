"""Whose orchestrator is there, and when there is nobody left to wait for."""

from __future__ import annotations

from trainer.runs.presence import Presence


def test_an_orchestrator_is_present_from_hello_to_bye_and_for_a_while_when_it_cannot_be_reached() -> None:
    runs = Presence()
    runs.called("a")
    runs.called("b")
    assert runs.present(0.0) == {"a", "b"}
    runs.left("b", 1.0)
    runs.unreachable("a", 10.0, patience=5.0)
    runs.unreachable("a", 14.0, patience=5.0)
    assert runs.present(15.0) == {"a"}
    assert runs.present(15.1) == set()
    runs.called("a")
    assert runs.present(99.0) == {"a"}


def test_it_is_over_once_every_run_that_had_a_place_has_ended() -> None:
    runs = Presence()
    assert not runs.over(0.0)
    runs.called("waits for a place")
    assert not runs.over(0.0)
    for run_id in "abc":
        runs.called(run_id)
        runs.admitted(run_id)
    runs.finished("a", farewell_before=100.0)
    runs.removed("b", "evicted")
    runs.removed("c", "deleted")
    assert not runs.over(99.0)
    assert runs.over(100.0)
    runs.left("a", 50.0)
    assert runs.over(50.0)
    assert not runs.all_evicted()
    runs.admitted("a")
    assert not runs.over(999.0), "it goes on with more steps"


def test_a_run_that_pauses_is_waited_for() -> None:
    runs = Presence()
    runs.called("a")
    runs.admitted("a")
    runs.left("a", 1.0)
    assert not runs.over(1e9)


def test_all_evicted_means_all() -> None:
    runs = Presence()
    assert not runs.all_evicted()
    for run_id in "ab":
        runs.admitted(run_id)
    runs.removed("a", "evicted")
    assert not runs.all_evicted()
    runs.removed("b", "evicted")
    assert runs.all_evicted()
    assert runs.over(0.0)
    assert runs.ended("b") == "evicted"


def test_a_finished_run_that_is_sent_away_is_waited_for() -> None:
    """Its checkpoint was damaged, say: it is not done."""
    runs = Presence()
    runs.finished("a", farewell_before=100.0)
    runs.called("a")
    runs.sent_away("a")
    assert runs.present(0.0) == set()
    assert not runs.over(1e9)
