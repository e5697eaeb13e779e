"""`counterpoint metrics`: each metric of the catalogue is printed, or those that have the given words."""

from __future__ import annotations

import pytest

from counterpoint.cli.main import main
from counterpoint.cli.metrics import PROCESSES
from counterpoint.transport.telemetry.metric import EVERYWHERE


def test_every_name_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics"]) == 0
    printed = capsys.readouterr().out
    words = {*printed.replace("{", " ").split()}
    for process in PROCESSES:
        assert process.title in printed
        assert {line.pattern for line in process.lines} <= words
        assert {metric.full_name for metric in process.metrics} <= words
    assert {metric.full_name for metric in EVERYWHERE} <= words
    assert "](" not in printed, "a link of a page"


def test_words_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "LOSSLESS", "lead"]) == 0
    printed = capsys.readouterr().out
    assert "staleness/lossless_lead" in printed
    assert "reward/mean" not in printed
    assert "Trainer" not in printed


def test_words_that_no_metric_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "rewrad"]) == 2
    assert "rewrad" in capsys.readouterr().err
