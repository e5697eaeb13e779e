"""Discarded rollouts are counted exactly and logged rarely, and failures do not use up the CPU."""

from __future__ import annotations

import logging
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.scheduling.outcomes import DropReason
from counterpoint.orchestrator.step.checkpoint import load_newest
from counterpoint.orchestrator.step.discarded import (
    DISCARDED_FILE,
    DROPPED_FILE,
    FAILING_GROUPS,
    PAUSE_SECONDS,
    RECORDED_BATCHES,
    WARN_BATCHES,
    DiscardedRollouts,
    in_words,
    is_counted,
    save,
    with_unrecorded,
)
from counterpoint.run.config import RunConfig, ScheduleConfig
from counterpoint.transport.process.notify import NotifySocket
from counterpoint.transport.records import Rollout
from tests.orchestrator.daemons import STEPS, metrics_of, records_of, started
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.fake_inference import FakeInference
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.rollouts import make_rollout

SCHEDULE = ScheduleConfig(group_size=4, rollouts_per_step=8, max_inflight_rollouts=32)
BATCH = SCHEDULE.rollouts_per_step


class Played:
    """`DiscardedRollouts` with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.discarded = DiscardedRollouts(SCHEDULE, lambda: self.now)

    def discard(self, groups: int, reason: str = "all 4 completed rollouts were filtered") -> None:
        for _ in range(groups):
            self.discarded.add([filtered() for _ in range(4)], DropReason.FILTERED, reason)


def filtered() -> Rollout:
    rollout = make_rollout()
    rollout.reward, rollout.filtered_by = 1.0, "zero_advantage"
    return rollout


def test_every_rollout_is_counted_whether_recorded_or_not() -> None:
    played = Played()
    groups = (RECORDED_BATCHES + 10) * BATCH // 4
    played.discard(groups)
    assert len(played.discarded.rollouts) == RECORDED_BATCHES * BATCH
    assert played.discarded.report()["rollouts/filtered"] == 4 * groups
    rollouts, unrecorded = played.discarded.take(1)
    assert played.discarded.report()["discarded"] == 0
    line: dict[str, Any] = {"step": 1, "rollouts/completed": len(rollouts), "rollouts/filtered": len(rollouts)}
    whole = with_unrecorded(line, unrecorded)
    assert whole["rollouts/completed"] == whole["rollouts/filtered"] == 4 * groups
    assert whole["rollouts/unrecorded"] == 10 * BATCH
    assert set(whole) == {"step", "rollouts/unrecorded", "rollouts/completed", "rollouts/failed", "rollouts/inference_failed",
                          "rollouts/filtered", "tokens/prompt", "tokens/completion", "tokens/untrained"}  # fmt: skip


def test_a_resume_goes_on_counting() -> None:
    played, resumed = Played(), Played()
    played.discard((RECORDED_BATCHES + 1) * BATCH // 4)
    before = played.discarded.report()
    resumed.discarded.restore(0, played.discarded.rollouts, played.discarded.counts())
    assert resumed.discarded.report() | {"time": 0, "reason": ""} == before | {"time": 0, "reason": ""}


def test_its_counts_are_told_from_the_others_whatever_an_environment_is_called() -> None:
    played = Played()
    played.discard(RECORDED_BATCHES * BATCH // SCHEDULE.group_size + 1)
    counts = played.discarded.counts()
    assert counts
    assert all(map(is_counted, counts))
    others = ["filters/repetition/unrecorded", "filters/gibberish/unrecorded/2", "rollouts/cancelled"]
    assert not any(map(is_counted, others))


def test_the_log_counts_up_and_says_it_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    played = Played()
    caplog.set_level(logging.WARNING)
    played.discard(200)
    numbers = [int(found) for found in re.findall(r"(\d+) rollouts have been discarded since step 0", caplog.text)]
    assert numbers == [WARN_BATCHES * BATCH * factor for factor in (1, 2, 4, 8)]


def test_a_report_is_notable_when_much_is_lost() -> None:
    played = Played()
    played.discard(WARN_BATCHES * BATCH // 4 - 1)
    assert not played.discarded.report()["notable"]
    played.discard(11)
    assert played.discarded.report()["notable"]
    words = in_words(played.discarded.report())
    assert words.startswith("104 rollouts discarded since step 0 (104 filtered): all 4 completed")


def test_failures_of_one_cause_are_one_line_and_another_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    played = Played()
    caplog.set_level(logging.WARNING)
    for number in range(664):
        played.discarded.rollout_failed(f"KeyError: '{number}' (in score, my.py:3)")
        played.now += 59 / 664
    (line,) = caplog.text.splitlines()
    assert line.endswith("rollout failed: KeyError: '0' (in score, my.py:3)")
    for _ in range(16 * 600):
        played.discarded.rollout_failed("KeyError: 'x' (in score, my.py:3)")
        played.now += 1 / 16
    later = [int(found) for found in re.findall(r"rollout failed, (\d+) times for this reason so far", caplog.text)]
    assert len(later) == 3, "after 60, 180 and 420 s"
    assert later == sorted(later)
    played.discarded.rollout_failed("KeyError: 'x' (in rollout, my.py:9)")
    assert "rollout failed: KeyError: 'x' (in rollout, my.py:9)" in caplog.text


def test_a_report_names_the_commonest_failure_since_the_step_and_no_older_one() -> None:
    discarded = Played().discarded
    for error in ["OSError: before (in a)"] * 9 + ["KeyError: now (in b)"]:
        discarded.rollout_failed(error)
    assert discarded.report()["failure"] == "OSError: before (in a)"
    discarded.take(1)
    assert discarded.report()["failure"] == ""
    discarded.rollout_failed("KeyError: again (in b)")
    assert discarded.report()["failure"] == "KeyError: now (in b)"


def test_the_pause_grows_while_everything_fails_and_only_then() -> None:
    played = Played()
    pauses = [played.discarded.rollout_failed("down") for _ in range(2000)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == PAUSE_SECONDS
    played.discarded.rollout_completed()
    assert played.discarded.rollout_failed("down") == PAUSE_SECONDS[0]


def test_completed_rollouts_pause_while_every_group_fails_when_it_is_finalized() -> None:
    played = Played()
    pauses = []
    for _ in range(200):
        pauses.append(played.discarded.rollout_completed())
        played.discarded.group_finalized(failed=True)
    assert pauses[:FAILING_GROUPS] == [0.0] * FAILING_GROUPS
    assert pauses == sorted(pauses)
    assert (pauses[FAILING_GROUPS], pauses[-1]) == PAUSE_SECONDS
    played.discard(1)
    assert played.discarded.report()["notable"]
    played.discarded.group_finalized(failed=False)
    assert played.discarded.rollout_completed() == 0.0
    assert not played.discarded.report()["notable"]


def test_nothing_is_notable_before_something_is_discarded_since_the_last_step() -> None:
    played = Played()
    for _ in range(FAILING_GROUPS * SCHEDULE.group_size):
        played.discarded.rollout_failed("KeyError: 'gone'")
    played.discard(FAILING_GROUPS)
    assert played.discarded.report()["notable"]
    played.discarded.take(5)
    assert not played.discarded.report()["notable"]
    played.discard(1)
    assert played.discarded.report()["notable"]


def test_what_inference_fails_is_held_against_no_environment(caplog: pytest.LogCaptureFixture) -> None:
    played = Played()
    caplog.set_level(logging.WARNING)
    pauses = {played.discarded.inference_failed("InferenceError: no answer") for _ in range(2000)}
    assert pauses == {PAUSE_SECONDS[0]}
    played.discard(1)
    assert not played.discarded.report()["notable"]
    assert len(caplog.text.splitlines()) == 1
    assert "rollout failed" not in caplog.text


def test_a_report_that_is_written_late_replaces_no_later_one(tmp_path: Path) -> None:
    for step, number in [(1, 7), (1, 636), (1, 524), (0, 900)]:
        save({"step": step, "discarded": number}, tmp_path)
    assert orjson.loads((tmp_path / DISCARDED_FILE).read_bytes()) == {"step": 1, "discarded": 636}
    save({"step": 2, "discarded": 0}, tmp_path)
    assert orjson.loads((tmp_path / DISCARDED_FILE).read_bytes()) == {"step": 2, "discarded": 0}


def test_a_report_without_a_rollout_takes_that_of_an_earlier_one_away(tmp_path: Path) -> None:
    for report, record in (({"step": 0, "discarded": 4}, lambda: b"{}"), ({"step": 1, "discarded": 0}, None)):
        save(report, tmp_path, record)
        assert (tmp_path / DROPPED_FILE).exists() == (record is not None)
    save({"step": 0, "discarded": 5}, tmp_path, lambda: b"{}")
    assert not (tmp_path / DROPPED_FILE).exists(), "it is recorded with step 1"


def test_a_report_that_cannot_be_written_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / DISCARDED_FILE).mkdir()
    save({"step": 1, "discarded": 2}, tmp_path)
    assert "discarded.json cannot be written" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [DISCARDED_FILE]


@pytest.mark.slow
def test_an_environment_that_always_fails_says_so_everywhere(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(args={"fault": "hopeless"})
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    said: list[str] = []

    def is_counted_in_a_status() -> bool:
        while (message := listener.receive()) is not None:
            said.append(message.get("STATUS", ""))
        return any("discarded" in status for status in said)

    with ScriptedTrainer(config.output_dir, "one", STEPS), started(config) as process:
        wait_until(is_counted_in_a_status, "a status that counts them")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 143
    listener.close()
    status = next(status for status in said if "discarded" in status)
    assert re.fullmatch(
        r"step 0 of 5; \d+ rollouts discarded since step 0 \(\d+ failed\): group \d+: no rollout of 4 survived; "
        r"the first error: ConnectionError: the sandbox is down \(in rollout, .*\)",
        status,
    )
    report = orjson.loads((config.run_dir / DISCARDED_FILE).read_bytes())
    assert report["rollouts/failed"] == report["discarded"] > 0
    assert report["failure"].startswith("ConnectionError: the sandbox\nis down (in rollout, ")
    (record,) = map(orjson.loads, (config.run_dir / DROPPED_FILE).read_bytes().splitlines())
    assert record["error"].startswith("ConnectionError: the sandbox")
    log = (config.run_dir / "orchestrator.log").read_text()
    assert log.count("rollout failed") == 1


@pytest.mark.slow
def test_what_is_dropped_is_written_at_once_however_little_it_is(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(args={"fault": "dull", "turns": 1}, schedule={"rollouts_per_step": 80_000})
    with ScriptedTrainer(config.output_dir, "one", STEPS), started(config) as process:
        wait_until((config.run_dir / DISCARDED_FILE).exists, "a report")
        wait_until((config.run_dir / DROPPED_FILE).exists, "a dropped rollout")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 143
    report = orjson.loads((config.run_dir / DISCARDED_FILE).read_bytes())
    assert (report["step"], report["notable"]) == (0, False)
    (record,) = map(orjson.loads, (config.run_dir / DROPPED_FILE).read_bytes().splitlines())
    assert record["dropped"] == "filtered"


@pytest.mark.slow
def test_a_run_that_can_ship_nothing_says_so_and_keeps_little(
    make_config: Callable[..., RunConfig], inference: FakeInference
) -> None:
    config = make_config(args={"fault": "dull", "turns": 1})
    recorded = RECORDED_BATCHES * BATCH
    with ScriptedTrainer(config.output_dir, "one", STEPS), started(config) as process:
        wait_until(lambda: inference.completions > recorded + 100, "more completions than are recorded")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 143
    assert "64 rollouts have been discarded since step 0" in (config.run_dir / "orchestrator.log").read_text()
    checkpoint = load_newest(config)
    assert checkpoint is not None
    assert len(checkpoint.waiting) == recorded
    unrecorded = checkpoint.counts["rollouts/unrecorded"]
    assert unrecorded > 0
    report = orjson.loads((config.run_dir / DISCARDED_FILE).read_bytes())
    assert report["rollouts/completed"] == report["rollouts/filtered"] == recorded + unrecorded


@pytest.mark.slow
def test_a_step_tells_since_when_its_life_has_been_going_on(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    with ScriptedTrainer(config.output_dir, "one", STEPS), started(config) as process:
        assert process.wait(DEADLINE_SECONDS) == 0
    uptimes = [line["uptime_seconds"] for line in metrics_of(config)]
    assert uptimes == sorted(uptimes)
    assert uptimes[0] > 0


@pytest.mark.slow
def test_records_say_of_each_rollout_whether_it_was_trained(make_config: Callable[..., RunConfig]) -> None:
    """A group that is scored until it is too old, and one that is dropped since one of its rollouts failed."""
    until = make_config().run_dir / "rollouts" / "step_3" / "STABLE"
    toy = {"kind": "tests.orchestrator.toy_environment:ScoredLate", "state_columns": ["answer"]}
    schedule = SCHEDULE.model_copy(update={"max_lead_steps": 2, "max_off_policy_steps": 2})
    environments = [{"name": "toy", **toy, "args": {"until": str(until)}}]
    config = make_config(steps=8, schedule=schedule, environments=environments)
    with ScriptedTrainer(config.output_dir, "one", 8) as trainer:
        assert run(config, lambda: None) == 0
    trained = {info.rollout_id for batch in trainer.trained for info in batch.samples}
    records = records_of(config)
    kept = [record for record in records if record["error"] is None and record["filtered_by"] is None]
    assert {record["rollout_id"] for record in kept if record["dropped"] is None} == trained
    dropped = {record["dropped"] for record in kept} - {None}
    assert dropped == {"stale", "incomplete"}
    assert len({record["group_id"] for record in kept if record["dropped"] == "stale"}) == 1
    counted = Counter[str]()
    for line in metrics_of(config):
        counted.update({name: value for name, value in line.items() if name.startswith(("trained/toy/", "stale/toy/"))})
    assert sum(count for name, count in counted.items() if name.startswith("trained/")) == len(trained)
    assert sum(count for name, count in counted.items() if name.startswith("stale/")) >= SCHEDULE.group_size
