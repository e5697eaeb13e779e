"""Callbacks: all are called, one that raises stops nobody, and their state survives."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from counterpoint.tune.callbacks.callback import Callback, Callbacks
from counterpoint.tune.trial import Trial


class Counting(Callback):
    def __init__(self) -> None:
        self.results = 0
        self.iterations: list[int] = []

    def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
        self.iterations.append(iteration)

    def on_trial_result(self, iteration: int, trials: Any, trial: Trial, result: Any, **info: Any) -> None:
        self.results += 1

    def state(self) -> dict[str, Any]:
        return {"results": self.results}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.results = state["results"]


class Raising(Callback):
    def on_trial_result(self, iteration: int, trials: Any, trial: Trial, result: Any, **info: Any) -> None:
        raise ValueError("broken")

    def state(self) -> dict[str, Any]:
        raise ValueError("broken")

    def restore_state(self, state: dict[str, Any]) -> None:
        raise ValueError(f"broken by {state}")


def test_one_that_raises_is_logged_once_and_the_others_hear(caplog: pytest.LogCaptureFixture) -> None:
    counting = Counting()
    callbacks = Callbacks([Raising(), counting])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            callbacks.notify("on_trial_result", iteration=0, trials=[], trial=Trial("m:a"), result={}, number=1)
    assert counting.results == 3
    assert [record.message for record in caplog.records] == [
        "Raising.on_trial_result failed; it will not be logged again"
    ]


def test_the_base_takes_every_event() -> None:
    callbacks = Callbacks([Callback()])
    trial: dict[str, Any] = {"iteration": 0, "trials": [], "trial": Trial("m:a")}
    callbacks.notify("setup", stop=None, num_samples=1, total_num_samples=1, later=True)
    callbacks.notify("on_step_begin", iteration=0, trials=[])
    for method in ("start", "restore", "complete", "recover", "fail"):
        callbacks.notify(f"on_trial_{method}", **trial)
    callbacks.notify("on_trial_save", **trial, checkpoint=None)
    callbacks.notify("on_trial_result", **trial, result={})
    callbacks.notify("on_step_end", iteration=1, trials=[])
    callbacks.notify("on_experiment_end", trials=[])


def test_states_go_to_their_own() -> None:
    before = Callbacks([Callback(), Counting()])
    before.notify("on_trial_result", iteration=0, trials=[], trial=Trial("m:a"), result={})
    counting = Counting()
    Callbacks([Callback(), counting]).restore_state(before.state())
    assert counting.results == 1


def test_one_without_a_state_does_not_keep_the_others_from_theirs(caplog: pytest.LogCaptureFixture) -> None:
    before = Callbacks([Raising(), Counting()])
    before.notify("on_trial_result", iteration=0, trials=[], trial=Trial("m:a"), result={})
    counting = Counting()
    Callbacks([Raising(), counting]).restore_state(before.state())
    assert counting.results == 1
    assert "Raising.state failed; it will not be logged again" in caplog.messages
