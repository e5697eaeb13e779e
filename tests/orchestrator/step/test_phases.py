"""Phases add up to the wall time, whatever is entered when; and how they are said."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.step.phases import PhaseClock, phases_in_words, sum_phases
from counterpoint.run.config import RunConfig
from counterpoint.transport.records import Batch
from counterpoint.transport.telemetry.intervals import busy_seconds
from tests.orchestrator.daemons import STEPS, metrics_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer

SECONDS = st.floats(0, 1e4)
PHASES = st.sampled_from(["generation", "finalize", "wait_trainer", "merge", "commit"])


@given(st.lists(st.tuples(SECONDS, PHASES | st.none()), min_size=1, max_size=30))
def test_the_phases_of_each_step_add_up_to_its_wall_time(entered: list[tuple[float, str | None]]) -> None:
    """None: the step ends."""
    now = began = 0.0
    started = False
    clock = PhaseClock(lambda: now)
    for seconds, phase in entered:
        now += seconds
        if phase is not None:
            clock.enter(phase)
            began, started = (began, True) if started else (now, True)
            continue
        taken = clock.take()
        assert bool(taken) == started
        if taken:
            wall = taken.pop("wall_seconds")
            assert wall == pytest.approx(now - began)
            assert sum(taken.values()) == pytest.approx(wall)
            when = {f"phase/{phase}": sum(each.busy for each in spent) for phase, spent in clock.last_step.items()}
            assert {name: seconds for name, seconds in when.items() if seconds} == pytest.approx(
                {name: seconds for name, seconds in taken.items() if seconds}
            )
            everything = [each for spent in clock.last_step.values() for each in spent]
            assert busy_seconds(everything, began, now) == pytest.approx(wall)
        began = now


def test_a_phase_that_outlasts_a_step_is_split() -> None:
    ticks: Iterator[int] = count()
    clock = PhaseClock(lambda: float(next(ticks)))
    clock.enter("commit")
    assert clock.so_far() == {"phase/commit": 1.0, "wall_seconds": 1.0}
    assert clock.take() == {"phase/commit": 2.0, "wall_seconds": 2.0}
    clock.enter("generation")
    assert clock.take() == {"phase/commit": 1.0, "phase/generation": 1.0, "wall_seconds": 2.0}


def test_phases_are_said_as_shares() -> None:
    lines = [
        {"phase/merge": 1.0, "phase/wait_trainer": 5.0, "step": 3},
        {"phase/generation": 194.0, "phase/merge": 0.2},
    ]
    seconds = sum_phases(lines)
    assert seconds == {"generation": 194.0, "wait_trainer": 5.0, "merge": 1.2}
    assert phases_in_words(seconds) == "generation 97 %, waiting for the trainer 2 %, making samples 1 %"
    assert phases_in_words(sum_phases([{"step": 1}])) == ""


@pytest.mark.slow
def test_a_runs_phases_add_up_and_say_what_was_waited_for(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    waiting, enter = threading.Event(), PhaseClock.enter

    def note(clock: PhaseClock, phase: str) -> None:
        if phase == "wait_trainer":
            waiting.set()
        enter(clock, phase)

    def hold(batch: Batch) -> None:
        assert batch.step == 1 or waiting.wait(60)

    monkeypatch.setattr(PhaseClock, "enter", note)
    with ScriptedTrainer(config.output_dir, "one", STEPS, answer=hold):
        assert run(config, lambda: None) == 0
    lines = metrics_of(config)
    for line in lines:
        phases = {name: seconds for name, seconds in line.items() if name.startswith("phase/")}
        assert sum(phases.values()) == pytest.approx(line["wall_seconds"], abs=1e-6)
        assert {"phase/merge", "phase/records", "phase/commit", "phase/malloc_trim"} <= set(phases)
    known = sum(line["wall_seconds"] for line in lines)
    assert known >= lines[-1]["uptime_seconds"], "which is measured apart, and before the last commit"
    waited = sum_phases(lines)
    assert waited["wait_trainer"] > 0, "nothing may start more than two steps before its weights"
    assert waited["generation"] > 0
