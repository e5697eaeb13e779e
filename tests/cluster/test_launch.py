"""Whom the guardian's code kills, in a world of processes that is made up: what moves between two looks at it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from cluster import launch

GUARDIAN, WORKER, ORPHAN, ITS_CHILD, NEWCOMER = 101, 102, 103, 104, 105


def test_orphans_are_killed_and_what_a_guarded_worker_starts_meanwhile_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = {os.getpid(): [GUARDIAN, ORPHAN], GUARDIAN: [WORKER], ORPHAN: [ITS_CHILD]}

    def looks() -> Iterator[dict[int, list[int]]]:
        yield world
        while True:
            yield world | {WORKER: [NEWCOMER]}

    at_each_look = looks()
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(launch, "_children", lambda: next(at_each_look))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    launch.kill_orphans([GUARDIAN])
    assert sorted(killed) == [(ORPHAN, signal.SIGKILL), (ITS_CHILD, signal.SIGKILL)]
