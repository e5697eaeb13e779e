"""The end of `counterpoint run`: what it does while the workers end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

import cli.run
from cluster.manager.events import Outcome
from job.supervision import Show, SupervisedJob


def test_curves_are_prepared_once_when_the_runs_have_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cli.run, "_prepare_curves", lambda: calls.append("prepared"))
    job = SimpleNamespace(histories={}, is_complete=False)

    def run(show: Show) -> Outcome:
        show([], [])
        assert not calls
        job.is_complete = True
        show([], [])
        show([], [])
        return Outcome(0, "done")

    job.run = run
    assert cli.run._run(cast(SupervisedJob, cast(Any, job)), Console()).code == 0
    assert calls == ["prepared"]
