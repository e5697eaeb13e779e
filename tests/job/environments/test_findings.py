"""What the check of an environment finds: each fault by its own check, and nothing in an environment that is sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from counterpoint.job.environments.findings import Finding, Level, findings
from counterpoint.job.environments.observe import Observations, Seconds
from counterpoint.run.loop_health.blame_evidence import Kind
from counterpoint.run.loop_health.slow_spots import SlowSpot
from counterpoint.run.loop_health.stacks import NOWHERE, CodePlace
from counterpoint.transport.records import Branch, Rollout
from counterpoint.transport.telemetry.agent_time import OWN, SECONDS, START
from tests.support.rollouts import make_turn

MIB = 2**20


def rollout(number: int, reward: float | None, error: str | None = None) -> Rollout:
    turn = make_turn([1, 2, 3], [4, 5])
    branch = Branch((turn,), np.arange(5, dtype=np.int32))
    made = Rollout(f"0-{number}", 0, "checked", number, [turn], reward=reward, error=error, state={"answer": "7"})
    made.branches = (branch,)
    return made


def sound() -> Observations:
    seen = Observations("checked", "mine:Mine", 60.0, 10)
    seen.groups = [[rollout(0, 0.0), rollout(1, 1.0)] for _ in range(3)]
    seen.seconds = [Seconds(1.0, 0.8, 0.1)] * 6
    seen.memory = [100 * MIB, 120 * MIB, 120 * MIB]
    seen.scored_again = 6
    return seen


def found(change: Callable[[Observations], Any]) -> dict[str, Finding]:
    seen = sound()
    change(seen)
    return {finding.check: finding for finding in findings(seen)}


def test_a_sound_environment_has_no_findings() -> None:
    assert {finding.level for finding in findings(sound())} == {Level.OK}


def set_group(*rollouts: Rollout) -> Callable[[Observations], Any]:
    return lambda seen: setattr(seen, "groups", [list(rollouts)])


def two_branches(seen: Observations) -> None:
    branches = seen.groups[0][0].branches
    assert branches is not None
    seen.groups[0][0].branches = (*branches, *branches)


def two_players(seen: Observations) -> None:
    first = seen.groups[0][0]
    turns = [replace(first.turns[0], player=player) for player in ("white", "black")]
    first.branches = tuple(Branch((turn,), np.arange(5, dtype=np.int32)) for turn in turns)


def program(seen: Observations) -> None:
    for each in seen.rollouts:
        each.metrics |= {SECONDS: 6.2, START: 5.1, OWN: 5.9}


def slow_spot(
    seconds: float, kind: Kind = Kind.CALLBACK, ours: bool = False, seen: bool = True
) -> Callable[[Observations], Any]:
    place = CodePlace("pack", "mine.py", 12, "", ours) if seen else NOWHERE
    return lambda seen: seen.slow_spots.add([SlowSpot(kind, place, seconds=seconds, worst=seconds, count=1)])


@pytest.mark.parametrize(
    ("change", "check", "level", "text"),
    [
        (lambda seen: seen.changed_examples.extend([1, 3]), "examples", Level.ERROR, "examples 1, 3 were not equal"),
        (set_group(rollout(0, 1.0), rollout(1, None, "KeyError: 'a'")), "outcomes", Level.WARNING, "1 of 2 rollouts"),
        (
            set_group(rollout(0, 1.0), rollout(1, None, "KeyError: 'a'"), rollout(2, None, "KeyError: 'a'")),
            "outcomes",
            Level.ERROR,
            "2 of 3 rollouts",
        ),
        (set_group(rollout(0, None, "KeyError: 'a'")), "outcomes", Level.ERROR, "the first error: KeyError: 'a'"),
        (set_group(rollout(0, None, "KeyError: 'a'")), "rewards", Level.ERROR, "no rollout has a reward"),
        (set_group(rollout(0, 1.0), rollout(1, 1.0)), "rewards", Level.WARNING, "equal within 1 of 1 groups"),
        (lambda seen: seen.changed_scores.append(("0-1", 0.2, 0.4)), "scoring", Level.WARNING, "0.2, then 0.4"),
        (lambda seen: seen.not_scored_again.append("KeyError: 'x'"), "scoring", Level.OK, "not checked for 1 scores"),
        (lambda seen: setattr(seen, "scored_again", 0), "scoring", Level.OK, "not checked"),
        (lambda seen: seen.seconds.append(Seconds(31.0, 1.0, 1.0)), "time", Level.WARNING, "= 60: raise it"),
        (slow_spot(0.1), "event loop", Level.WARNING, "pack (mine.py:12)"),
        (slow_spot(1.0), "event loop", Level.ERROR, "late by 1 s"),
        (slow_spot(1.0, Kind.MACHINE), "event loop", Level.OK, "nothing of the environment held"),
        (slow_spot(0.1, seen=False), "event loop", Level.OK, "nothing of the environment held"),
        (slow_spot(1.0, seen=False), "event loop", Level.ERROR, "late by 1 s"),
        (lambda seen: seen.not_awaited.append("`await` is missing"), "awaits", Level.ERROR, "`await` is missing"),
        (slow_spot(1.0, ours=True), "event loop", Level.OK, "nothing of the environment held"),
        (two_branches, "sequences", Level.WARNING, "up to 2 sequences"),
        (two_players, "sequences", Level.OK, "one sequence"),
        (program, "time", Level.OK, "the program takes 5.9 s itself, 5.1 s of them before its first request"),
        (lambda seen: seen.groups[0][0].state.update(big="x" * 10**5), "state", Level.WARNING, "keep less in it"),
        (lambda seen: seen.memory.append(900 * MIB), "memory", Level.WARNING, "belongs into its state"),
        (lambda seen: seen.left_threads.append("mine"), "leftovers", Level.WARNING, "1 threads (mine)"),
        (lambda seen: seen.left_processes.append(12), "leftovers", Level.WARNING, "1 processes (12)"),
    ],
)
def test_each_fault_is_found(change: Callable[[Observations], Any], check: str, level: Level, text: str) -> None:
    finding = found(change)[check]
    assert finding.level is level
    assert text in finding.text


@pytest.mark.parametrize("check", ["scoring", "lengths", "sequences", "state"])
def test_what_needs_completed_rollouts_is_not_called_sound_without_any(check: str) -> None:
    finding = found(set_group(rollout(0, None, "KeyError: gone")))[check]
    assert (finding.level, finding.text) == (Level.WARNING, "not checked: no rollout completed")


def test_completions_that_were_cut() -> None:
    seen = sound()
    for each in seen.rollouts:
        each.turns = [make_turn([1], [2, 3], finish_reason="length")]
    (lengths,) = (finding for finding in findings(seen) if finding.check == "lengths")
    assert lengths.level is Level.WARNING
    assert "6 of 6 completions were cut by max_tokens: raise it" in lengths.text
