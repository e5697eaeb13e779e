"""The study of stragglers: its job is a valid one, and its examples are what it says."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from counterpoint.cli.main import main
from perf.straggler_study import CHOICES, SlowGuesses, job


def test_each_choice_has_a_run_for_each_seed(tmp_path: Path) -> None:
    settings = job(tmp_path / "job", delay=1.0, seeds=2)
    assert len(settings["runs"]) == 2 * len(CHOICES)
    (tmp_path / "study.toml").write_text(tomli_w.dumps(settings))
    assert main(["run", str(tmp_path / "study.toml"), "--dry-run"]) == 0


def test_slow_examples_come_first() -> None:
    environment = SlowGuesses(fast=2, slow=8)
    examples = [environment.example(index) for index in range(len(environment))]
    assert [each.index for each in examples] == list(range(10))
    assert [each.prompt.split()[0] for each in examples] == ["guess"] * 8 + ["reverse"] * 2
