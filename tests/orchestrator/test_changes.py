"""Keys of a run's configuration that change while it runs: checked, at one step, and again after a kill."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.mix import ExampleMix
from counterpoint.job.population.exploit import ExploitRefused, change_run, outcome, request_change, wait
from counterpoint.orchestrator.changes import KEPT_ENTRIES, MOST_ENTRIES, _compact, read_changes
from counterpoint.orchestrator.daemon import run
from counterpoint.run.changes import (
    JOURNAL,
    Change,
    ChangeRefused,
    JournalError,
    LearningRates,
    apply,
    completed,
    in_force,
    read_journal,
    write_journal,
)
from counterpoint.run.config import RunConfig
from counterpoint.run.requests import Answer, SaveRequest, read_answer, waiting_requests, write_answer, write_request
from counterpoint.transport.records import Batch
from tests.orchestrator.daemons import assert_whole, started
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.polling import wait_until


def small_config(**fields: Any) -> RunConfig:
    environments = [{"name": "a.b", "kind": "reverse-text"}, {"name": "c", "kind": "reverse-text"}]
    return RunConfig.model_validate({"output_dir": "/tmp", "model": "m", "environments": environments, **fields})


def test_keys_that_may_change_do_and_others_are_named() -> None:
    config = small_config()
    changed = apply(
        config,
        {
            "training.learning_rate": 3e-4,
            "sampling.temperature": 0.7,
            "sampling.stop": ["x"],
            "advantage.kind": "leave_one_out",
            "environments.a.b.ratio": 3,
            "schedule.max_inflight_rollouts": "auto",
        },
    )
    assert changed.schedule.most_in_flight == config.schedule.most_within_lead
    assert changed.training.learning_rate == 3e-4
    assert (changed.sampling.temperature, changed.sampling.stop) == (0.7, ["x"])
    assert changed.advantage.kind == "leave_one_out"
    assert [environment.ratio for environment in changed.environments] == [3, 1]
    assert config == small_config(), "the former one is as it was"
    with pytest.raises(ChangeRefused) as refusal:
        apply(config, {"steps": 4, "training.lora.rank": 2, "environments.z.ratio": 1, "sampling.temperature": 0.5})
    for name in ("steps cannot change", "training.lora.rank cannot change", "no environment 'z'", "advantage.*"):
        assert name in str(refusal.value)
    assert "sampling.temperature" not in str(refusal.value).partition("those that can")[0]
    for bad in ({"sampling.temperature": -1}, {"sampling.warmth": 1}, {"training.learning_rate": math.inf}):
        with pytest.raises(ChangeRefused, match=r"(?i)greater|there is no key sampling\.warmth|finite"):
            apply(config, bad)
    with pytest.raises(ChangeRefused, match=r"sampling\.temprature\b.*\bsampling\.temperature\b"):
        apply(config, {"sampling.temprature": 0.8})
    with pytest.raises(ChangeRefused, match=r"training\.learning_rat\b.*\btraining\.learning_rate\b"):
        apply(config, {"training.learning_rat": 1e-4})
    with pytest.raises(ChangeRefused, match=r"environments\.a\.rtio\b.*environments\.<name>\.ratio\b"):
        apply(config, {"environments.a.rtio": 2})
    with pytest.raises(ChangeRefused, match=r"\bxyz\b.* filters, "):
        apply(config, {"xyz": 1})
    with pytest.raises(ChangeRefused, match=r"^sampling\.temperature = 'hot': expected a valid number"):
        apply(config, {"sampling.temperature": "hot"})


@pytest.mark.parametrize(
    ("overlong", "longest", "buffer"),
    [({}, 1000, 200), ({"buffer": 40}, 1000, 40), ({"longest": 100}, 100, 20), ({"longest": 100, "buffer": 5}, 100, 5)],
)
def test_what_counts_as_overlong_follows_the_longest_completion_unless_it_is_set(
    overlong: dict[str, int], longest: int, buffer: int
) -> None:
    config = small_config(training={"loss": {"kind": "dapo"}}, advantage={"overlong": overlong})
    change = {"sampling.max_tokens": 1000}
    changed = apply(config, completed(config, change)).advantage.overlong
    assert changed is not None
    assert (changed.longest, changed.buffer, changed.penalty) == (longest, buffer, 1.0)
    for other, changes in (
        (config, {"sampling.temperature": 0.5}),
        (config, {"sampling.max_tokens": 1000, "advantage.overlong": {"longest": 9}}),
        (small_config(), change),
    ):
        assert completed(other, changes) == changes


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_a_journal_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    key = "sampling.chat_template_kwargs"
    for depth in (200, 249, 250, 251, 252, 253):
        with suppress(ChangeRefused):
            write_journal(tmp_path, [Change(request_id="deep", step=1, changes={key: nested(depth)})])
        assert len(read_journal(tmp_path)) == 1
    with pytest.raises(ChangeRefused, match="cannot be journalled"):
        write_journal(tmp_path, [Change(request_id="deep", step=1, changes={key: nested(253)})])
    long = [Change(request_id=f"n{n}", step=1, changes={key: {"a": "x" * 60_000}}) for n in range(18)]
    write_journal(tmp_path, long[:17])
    with pytest.raises(ChangeRefused, match="at most 1048576"):
        write_journal(tmp_path, long)
    assert read_journal(tmp_path) == long[:17]


def test_what_is_no_request_stands_in_no_others_way(tmp_path: Path) -> None:
    (tmp_path / "control" / "requests" / "a.json").mkdir(parents=True)
    os.mkfifo(tmp_path / "control" / "requests" / "b.json")
    write_request(tmp_path, SaveRequest(request_id="c"))
    for expected in (["a", "b", "c"], []):
        found = [request_id for request_id, _ in waiting_requests(tmp_path, ("save",))]
        assert found == expected
        for request_id in found:
            write_answer(tmp_path, Answer(request_id=request_id, outcome="done"))


def test_an_answer_quotes_nothing_that_could_steer_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    write_answer(tmp_path, Answer(request_id="r", outcome="refused", reason="no run '\x1b[2J'"))
    assert read_answer(tmp_path, "r") == Answer(request_id="r", outcome="refused", reason="no run '\\x1b[2J'")


def test_the_journal_gives_each_step_its_values(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    rates = LearningRates(tmp_path)
    assert rates.at(1) is None
    changes = [
        Change(request_id="one", step=3, changes={"training.learning_rate": 1e-3, "sampling.top_k": 5}),
        Change(request_id="two", step=5, changes={"training.learning_rate": 2e-3}),
        Change(request_id="three", step=5, changes={"sampling.top_k": 6}),
    ]
    write_journal(tmp_path, changes)
    assert read_journal(tmp_path) == changes
    assert [rates.at(step) for step in (2, 3, 4, 5, 9)] == [None, 1e-3, 1e-3, 2e-3, 2e-3]
    assert in_force(changes, 5) == {"training.learning_rate": 2e-3, "sampling.top_k": 6}
    for bad in (b"{", b'{"format": "2", "changes": []}', b'{"format": 1, "changes": [{"step": 1}]}'):
        (tmp_path / "control" / JOURNAL).write_bytes(bad)
        with pytest.raises(JournalError, match="Remove it"):
            rates.at(3)
    write_journal(tmp_path, [Change(request_id="one", step=1, changes={"training.learning_rate": "much"})])
    with pytest.raises(JournalError, match="above 0"):
        rates.at(3)


def test_a_value_that_was_edited_in_the_file_since_holds_again(tmp_path: Path) -> None:
    def given(rate: float) -> RunConfig:
        return small_config(output_dir=tmp_path, training={"learning_rate": rate})

    control = given(1e-3).run_dir / "control"
    control.mkdir(parents=True)
    assert read_changes(given(1e-3), 3) == (given(1e-3), [])
    changes = {"training.learning_rate": 2e-3, "sampling.temperature": 0.5}
    former = {"training.learning_rate": 1e-3, "sampling.temperature": 1.0}
    change = Change(request_id="one", step=4, changes=changes, given=former)
    write_journal(given(1e-3).run_dir, [change])
    config, journal = read_changes(given(1e-3), 4)
    assert (config.training.learning_rate, config.sampling.temperature, journal) == (2e-3, 0.5, [change])
    for _ in range(2):  # and once only
        config, journal = read_changes(given(5e-4), 6)
        assert (config.training.learning_rate, config.sampling.temperature) == (5e-4, 0.5)
        assert [(entry.step, entry.changes) for entry in journal[1:]] == [(7, {"training.learning_rate": 5e-4})]
    assert [LearningRates(config.run_dir).at(step) for step in (3, 4, 6, 7)] == [None, 2e-3, 2e-3, 5e-4]
    write_journal(config.run_dir, [change.model_copy(update={"changes": {"steps": 3}})])
    with pytest.raises(ChangeRefused, match="steps cannot change"):
        read_changes(given(5e-4), 6)


def test_a_change_of_what_was_removed_from_the_file_is_left_out(tmp_path: Path) -> None:
    def given(*names: str) -> RunConfig:
        environments = [{"name": "words", "kind": "reverse-text"}]
        evaluations = [{"name": name, "environments": environments} for name in names]
        return small_config(output_dir=str(tmp_path), evaluations=evaluations)

    changes = {"evaluations.held-out.share": 0.5, "sampling.temperature": 0.7}
    former = {"evaluations.held-out.share": given("held-out").evaluations[0].share, "sampling.temperature": 1.0}
    (given().run_dir / "control").mkdir(parents=True)
    change = Change(request_id="one", step=1, changes=changes, given=former)
    write_journal(given().run_dir, [change])
    config, journal = read_changes(given(), 1)
    assert config.sampling.temperature == 0.7
    assert [entry.changes for entry in journal] == [{"sampling.temperature": 0.7}]
    config, journal = read_changes(given("held-out"), 1)  # it is there again
    assert (config.evaluations[0].share, journal) == (0.5, [change])


def test_a_long_journal_is_joined_where_no_step_is_trained_again() -> None:
    journal = [Change(request_id=f"c{n}", step=n + 1, changes={"sampling.top_k": n}) for n in range(MOST_ENTRIES)]
    assert _compact(journal[:-1], 200) == journal[:-1]
    joined = _compact(journal, 200)
    assert len(joined) == MOST_ENTRIES - 199
    assert all(in_force(joined, step) == in_force(journal, step) for step in range(200, MOST_ENTRIES + 2))
    assert len(_compact(journal, 10**6)) == KEPT_ENTRIES + 1
    assert _compact(journal, 0) == journal


def test_new_ratios_count_from_where_they_hold_also_after_a_resume() -> None:
    def mix(*ratios: float) -> ExampleMix:
        environments = [
            EnvironmentConfig(name=name, kind="reverse-text", ratio=ratio)
            for name, ratio in zip("ab", ratios, strict=True)
        ]
        return ExampleMix(environments, {"a": 50, "b": 50}, seed=1)

    one = mix(1, 1)
    for _ in range(100):
        one.next()
    before = one.state()
    one.reweight({"a": 1, "b": 9})
    drawn = [one.next() for _ in range(50)]
    assert Counter(name for name, _ in drawn) == {"a": 5, "b": 45}, "and not 50 of b to make up for the past"
    resumed = mix(1, 9)
    resumed.restore(before)
    assert [resumed.next() for _ in range(50)] == drawn, "killed before the next checkpoint"
    again = mix(1, 9)
    again.restore(one.state())
    assert [again.next() for _ in range(50)] == [one.next() for _ in range(50)]


NEW = {"sampling.temperature": 0.5, "advantage.kind": "standardised", "training.learning_rate": 3e-4}


@pytest.mark.slow
def test_a_running_run_changes_at_a_named_step(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(steps=10)
    released, steps = threading.Event(), list[int]()

    def hold(batch: Batch) -> None:
        assert batch.step < 3 or released.wait(60)

    def change() -> None:
        trainer.wait_for_step(2)
        with pytest.raises(ExploitRefused, match=r"schedule\.group_size cannot change"):
            change_run(config.output_dir, "one", {"schedule.group_size": 2})
        steps.append(change_run(config.output_dir, "one", NEW))
        released.set()

    with ScriptedTrainer(config.output_dir, "one", 10, answer=hold) as trainer:
        changing = threading.Thread(target=change)
        changing.start()
        assert run(config, lambda: None) == 0
        changing.join(60)
    (step,) = steps
    assert_whole(config, 10)
    assert 3 <= step <= 6
    assert [entry.step for entry in read_journal(config.run_dir)] == [step]
    assert "1e-05" in (config.run_dir / "control" / "orch.toml").read_text(), "the configuration as given"
    groups: dict[str, list[float]] = defaultdict(list)
    for batch in trainer.trained:
        starts = batch.sample_offsets
        for sample, first, last in zip(batch.samples, starts, starts[1:], strict=False):
            if batch.step < step:
                assert sample.temperature == 1.0
            if sample.policy_version >= step:
                assert sample.temperature == 0.5
                group = sample.rollout_id.partition("-")[0]
                groups[group].append(float(np.abs(batch.advantages_T[first:last]).max()))
    whole = [values for values in groups.values() if len(values) == config.schedule.group_size]
    assert whole
    assert all(math.isclose(np.mean(np.square(values)), 1.0, rel_tol=1e-4) for values in whole)


@pytest.mark.slow
def test_a_change_that_stock_servers_have_no_ratios_for_is_refused(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers that the check at the start returns answer right at temperature 1 alone."""
    config, released = make_config(steps=4), threading.Event()

    async def ignoring(*_: object) -> set[str]:
        return {"http://a:1"}

    def hold(batch: Batch) -> None:
        assert batch.step < 3 or released.wait(60)

    def change() -> None:
        try:
            trainer.wait_for_step(2)
            with pytest.raises(ExploitRefused, match=r"http://a:1 .*temperature = 0\.5"):
                change_run(config.output_dir, "one", {"sampling.temperature": 0.5})
            refused.append("temperature")
        finally:
            released.set()

    refused: list[str] = []
    monkeypatch.setattr("counterpoint.orchestrator.daemon.check_stock_servers", ignoring)
    with ScriptedTrainer(config.output_dir, "one", 4, answer=hold) as trainer:
        changing = threading.Thread(target=change)
        changing.start()
        assert run(config, lambda: None) == 0
        changing.join(60)
    assert refused
    assert {sample.temperature for batch in trainer.trained for sample in batch.samples} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", ["write_journal", "write_answer", ""])
def test_a_change_holds_once_whatever_is_killed(make_config: Callable[..., RunConfig], killed_at: str) -> None:
    config = make_config(steps=8)
    fault = (
        f"import os, counterpoint.orchestrator.changes as c; c.{killed_at} = lambda *a: os._exit(9); "
        if killed_at
        else ""
    )
    released = threading.Event()

    def hold(batch: Batch) -> None:
        assert batch.step < 3 or released.wait(60)

    with ScriptedTrainer(config.output_dir, "one", 8, answer=hold) as trainer:
        with started(config, fault) as process:
            trainer.wait_for_step(2)
            request_change(config.output_dir, "one", NEW, request_id="change")
            if killed_at:
                wait_until(lambda: process.poll() is not None, "the kill")
            else:
                wait(config.output_dir, "one", "change", 60)
        journalled = [entry.step for entry in read_journal(config.run_dir)]
        assert len(journalled) == (killed_at != "write_journal")
        request_change(config.output_dir, "one", NEW, request_id="change")
        released.set()
        assert run(config.model_copy(update={"resume": True}), lambda: None) == 0
    (step,) = [entry.step for entry in read_journal(config.run_dir)]
    assert step == (journalled or [step])[0]
    answer = outcome(config.output_dir, "one", "change")
    assert answer is not None
    assert (answer.outcome, answer.step) == ("done", step)
    assert_whole(config, 8)
    newer = [
        sample.temperature for batch in trainer.trained for sample in batch.samples if sample.policy_version >= step
    ]
    assert set(newer) <= {0.5}
