"""What the tests of the commands `replay` and `attribute` share."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from counterpoint.cli.dumps.replay import settings_of
from counterpoint.job.replay.replay import Settings

SECONDS = 0.1


@pytest.fixture
def short_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands idle for a moment where they idle for seconds: these tests are not of what they measure then."""

    def short(given: argparse.Namespace, **settings: float) -> Settings:
        return replace(settings_of(given, **settings), baseline_seconds=SECONDS)

    monkeypatch.setattr("counterpoint.cli.dumps.replay.settings_of", short)
    monkeypatch.setattr("counterpoint.job.replay.attribute.PAUSE_SECONDS", SECONDS / 5)
