"""Decisions reach the disk in order, in bounded space, and cost nothing else."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.orchestrator import decisions
from counterpoint.orchestrator.decisions import DECISIONS_FILE, Decision, DecisionLog
from counterpoint.run.config import RunConfig
from counterpoint.transport.files.json_lines import read_lines
from tests.orchestrator.daemons import STEPS, started
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.polling import DEADLINE_SECONDS, wait_until


def test_decisions_are_written_in_order(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    log.of_group(3, Decision.STARTED, rollouts=4)
    log.of_run(Decision.DRAINED, 2)
    log.flush()
    log.of_group(3, Decision.SHIPPED, step=3)
    log.flush()
    lines = [line for _, line in read_lines(tmp_path / DECISIONS_FILE)]
    assert [line["decision"] for line in lines] == ["started", "drained", "shipped"]
    assert lines[0] == {"time": lines[0]["time"], "group": 3, "decision": "started", "rollouts": 4}
    assert lines[1] == {"time": lines[1]["time"], "decision": "drained", "step": 2}


def test_space_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_BYTES", 2000)
    log = DecisionLog(tmp_path)
    for group_id in range(200):
        log.of_group(group_id, Decision.STARTED)
        log.flush()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [DECISIONS_FILE, f"{DECISIONS_FILE}.1"]
    assert all(path.stat().st_size < 2200 for path in files)
    kept = [line["group"] for path in reversed(files) for _, line in read_lines(path)]
    assert kept == list(range(kept[0], 200))


def test_what_waits_for_a_disk_that_hangs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_PENDING", 10)
    log = DecisionLog(tmp_path)
    for group_id in range(25):
        log.of_group(group_id, Decision.STARTED)
    log.flush()
    assert [line["group"] for _, line in read_lines(tmp_path / DECISIONS_FILE)] == list(range(15, 25))


def test_a_disk_that_fails_is_said_once_and_costs_lines_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / DECISIONS_FILE).mkdir()
    log = DecisionLog(tmp_path)
    for _ in range(3):
        log.of_group(1, Decision.STARTED)
        log.flush()
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.slow
def test_every_group_of_a_run_has_its_story(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(args={"fault": "exception"})
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        with started(config) as process:
            wait_until((config.run_dir / "checkpoints" / "step_2").exists, "the commit of step 2")
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_SECONDS) == 143
        with started(config.model_copy(update={"resume": True})) as process:
            assert process.wait(DEADLINE_SECONDS) == 0
    lines = [line for _, line in read_lines(config.run_dir / DECISIONS_FILE)]
    of_run = [line["decision"] for line in lines if "group" not in line]
    assert of_run == ["drained", "resumed"]
    story: dict[int, list[str]] = {}
    for line in lines:
        if "group" in line:
            story.setdefault(line["group"], []).append(line["decision"])
    assert all(decided[0] == "started" for decided in story.values())
    assert {decided[-1] for decided in story.values()} == {"shipped", "dropped"}
    reasons = {line["reason"] for line in lines if line["decision"] == "dropped"}
    assert "failed" in reasons
    shipped = [line for line in lines if line["decision"] == "shipped"]
    assert sorted({line["step"] for line in shipped}) == list(range(1, STEPS + 1))
