"""Groups that show no difference are counted, and a notice says why, as long as it is true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.cli.show import main as show
from counterpoint.job.reading.metrics.history import History
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.step import differences as differences_module
from counterpoint.orchestrator.step.differences import (
    EXAMPLES,
    EXAMPLES_FILE,
    GIVE_UP_SECONDS,
    GROUPS,
    NOTICE_FILE,
    Differences,
    DifferenceWatch,
    compared,
    forget,
    read_notice,
)
from counterpoint.run.config import RunConfig, ScheduleConfig
from counterpoint.transport.records import Rollout
from tests.orchestrator.daemons import started
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.rollouts import make_rollout, make_turn


def group(number: int, *rewards: float | None, advantages: tuple[float, ...] = (), **fields: Any) -> list[Rollout]:
    """A finalized group; without a reward a rollout failed. By default no advantage differs from zero."""
    made = []
    for index, reward in enumerate(rewards):
        advantage = advantages[index] if advantages else 0.0
        error = "KeyError: gone" if reward is None else None
        made.append(make_rollout(number, index, reward=reward, advantage=advantage, error=error, **fields))
    return made


def test_a_notice_comes_after_so_many_groups_and_whenever_their_number_has_doubled() -> None:
    differences = Differences(lambda: 7.0)
    changed = [number for number in range(1, 5 * GROUPS) if differences.add(group(number, 0.0, 0.0), "group")]
    assert changed == [GROUPS, 2 * GROUPS, 4 * GROUPS]
    notice = differences.notice
    assert notice is not None
    assert (notice.groups, notice.since) == (4 * GROUPS, 7.0)
    assert f"in {4 * GROUPS} of them each rollout has the reward 0 (environment toy)" in str(notice)
    rounded = Differences(first=4)
    assert [rounded.add(group(number, 0.1, 0.1 * 3 / 3), "group") for number in range(4)] == [False] * 3 + [True]
    assert "in 4 of them each rollout has the reward 0.1 " in str(rounded.notice)
    assert "env check" in notice.advice
    assert differences.add(group(0, 0.0, 1.0, advantages=(-0.5, 0.5)), "group")
    assert (differences.notice, differences.groups) == (None, 0)
    assert not differences.add(group(0, 0.0, 1.0, advantages=(-0.5, 0.5)), "group")


@pytest.mark.parametrize(
    ("batch", "notices"), [(1, [4, 64, 128]), (8, [8, 64, 128]), (48, [48, 96]), (1000, [64, 128])]
)
def test_the_first_batch_without_any_difference_is_told_at_once(batch: int, notices: list[int]) -> None:
    differences = Differences(first=batch)
    said = [number for number in range(1, 130) if differences.add(group(number, 1.0, 1.0), "group")]
    assert said == notices
    assert differences.add(group(0, 0.0, 1.0, advantages=(-0.5, 0.5)), "group")
    assert not any(differences.add(group(number, 1.0, 1.0), "group") for number in range(GROUPS - 1)), "it has learned"


def test_what_filters_leave_nothing_of_shows_no_difference() -> None:
    differences = Differences(first=4)
    caught = group(1, 0.0, 1.0, advantages=(-0.5, 0.5), filtered_by="repetition")
    assert [differences.add(caught, "group") for _ in range(4)] == [False] * 3 + [True]
    assert "the filters caught each rollout (repetition)" in str(differences.notice)
    caught[0].filtered_by = None
    assert differences.add(caught, "group")
    assert differences.notice is None


@given(st.lists(st.booleans(), max_size=300))
def test_the_number_is_that_of_groups_since_the_last_difference(alike: list[bool]) -> None:
    differences = Differences()
    for number, is_alike in enumerate(alike):
        differences.add(group(number, 1.0, 1.0 - (not is_alike), advantages=(0.0, 0.0 if is_alike else 1.0)), "group")
    since = next((count for count, is_alike in enumerate(reversed(alike)) if not is_alike), len(alike))
    assert differences.groups == since
    assert (differences.notice is not None) == (since >= GROUPS)


def test_the_commonest_reason_is_named() -> None:
    differences = Differences()
    cut = [make_turn([1], [2], finish_reason="length")]
    for number in range(GROUPS):
        differences.add(group(number, None, None, 0.0) if number % 4 else group(number, 1.0, 1.0, turns=cut), "group")
    assert differences.notice is not None
    assert "in 48 of them one rollout completed and the others failed" in str(differences.notice)
    assert "counterpoint status" in differences.notice.advice
    differences = Differences()
    for number in range(GROUPS):
        differences.add(group(number, 1.0, 1.0, turns=cut), "group")
    assert differences.notice is not None
    assert "max_tokens cut 100% of the completions" in str(differences.notice)
    assert differences.notice.advice.startswith("raise sampling.max_tokens")


def test_the_worst_are_of_different_examples() -> None:
    differences = Differences()
    for number in range(GROUPS):
        reward = float(number % 8 in (2, 3, 5)) - 1.0
        differences.add(group(number % 8, reward, reward), "group")
    worst = differences.take_worst()
    assert len({rollout.example_index for rollout in worst}) == len(worst) == EXAMPLES
    assert {rollout.reward for rollout in worst} == {-1.0}
    assert differences.take_worst() == []


def test_rewards_that_are_compared_over_steps_may_be_alike_within_a_group() -> None:
    differences = Differences()
    assert not any(differences.add(group(number, float(number % 2)), "run") for number in range(3 * GROUPS))
    changed = [number for number in range(3 * GROUPS) if differences.add(group(number, 0.5), "run")]
    assert len(changed) == 2
    assert differences.notice is not None


def test_a_penalty_for_length_or_a_players_reward_is_a_difference_over_steps() -> None:
    differences = Differences()
    for number in range(GROUPS):
        differences.add(group(number, 1.0, 1.0, advantages=(1.0, 0.9)), "run")
        won, lost = ({"white": each, "black": -each} for each in (1.0, -1.0))
        games = [*group(number, 0.0, player_rewards=won), *group(number, 0.0, player_rewards=lost)]
        differences.add(games, "run")
    assert differences.groups == 0


def test_groups_that_failed_are_reported_as_failures() -> None:
    differences = Differences()
    assert not any(differences.add(group(number, None, None), "group") for number in range(2 * GROUPS))
    assert differences.groups == 0


def test_what_is_compared_follows_from_the_algorithm(make_config: Callable[..., RunConfig]) -> None:
    assert compared(make_config()) == "group"
    assert compared(make_config(advantage={"kind": "batch_standardised"}, filters=[])) == "run"


def test_files_are_there_as_long_as_it_is_true(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    config.run_dir.mkdir(parents=True)
    due: list[Callable[[], None]] = []
    watch = DifferenceWatch(config, lambda rollout: f"{rollout.rollout_id}\n".encode(), due.append)
    for number in range(GROUPS):
        watch.group_finalized(config, group(number, 0.0, 0.0), may_give_up=True)
    assert not (config.run_dir / NOTICE_FILE).exists()
    due.pop()()
    notice = read_notice(config.run_dir)
    assert notice is not None
    assert notice.groups == GROUPS
    assert len((config.run_dir / EXAMPLES_FILE).read_text().splitlines()) == EXAMPLES
    for number in range(GROUPS):
        watch.group_finalized(config, group(number, 0.0, 0.0), may_give_up=True)
    watch.group_finalized(config, group(0, 0.0, 1.0, advantages=(-0.5, 0.5)), may_give_up=True)
    for write in reversed(due):  # threads may overtake each other
        write()
    assert read_notice(config.run_dir) is None
    assert not (config.run_dir / EXAMPLES_FILE).exists()
    forget(config.run_dir)


def test_a_run_ends_whose_first_groups_show_no_difference(make_config: Callable[..., RunConfig]) -> None:
    now = [100.0]

    def count(differences: Differences, groups: int, *rewards: float, **fields: Any) -> None:
        for number in range(groups):
            differences.add(group(number, *rewards, **fields), "group")

    differences = Differences(lambda: now[0])
    count(differences, 200, 0.0, 0.0)
    assert differences.last_notice(200) is None, "within the first minute"
    now[0] += GIVE_UP_SECONDS
    assert differences.last_notice(201) is None
    assert differences.last_notice(0) is None
    ended = differences.last_notice(200)
    assert ended is not None
    assert ended.groups == 200
    count(differences, 1, 0.0, 1.0, advantages=(-0.5, 0.5))
    count(differences, 200, 0.0, 0.0)
    now[0] += GIVE_UP_SECONDS
    assert differences.last_notice(200) is None, "it has learned something"


@pytest.mark.parametrize(
    "written",
    [b"", b"[]", b'{"groups": true}', b'{"groups": 1e300, "since": 1}', b'{"groups": 5, "since": "x"}', b"x" * 2**15],
)
def test_a_notice_of_a_guest_is_checked(tmp_path: Path, written: bytes) -> None:
    (tmp_path / NOTICE_FILE).write_bytes(written)
    assert read_notice(tmp_path) is None
    (tmp_path / NOTICE_FILE).write_bytes(
        orjson.dumps({"groups": 5, "since": 1, "reason": "\x1b[2J" * 999, "advice": 7})
    )
    notice = read_notice(tmp_path)
    assert notice is not None
    assert "\x1b" not in str(notice)
    assert len(str(notice)) < 2000


@pytest.mark.slow
@pytest.mark.parametrize("filters", [None, []], ids=["nothing ships", "steps ship"])
def test_a_run_without_any_difference_says_so_and_shows_examples(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], filters: list[Any] | None
) -> None:
    schedule = ScheduleConfig(group_size=4, rollouts_per_step=64, max_inflight_rollouts=64)
    others = {} if filters is None else {"filters": filters}
    config = make_config(args={"fault": "dull", "turns": 1}, schedule=schedule, steps=1000, **others)
    with ScriptedTrainer(config.output_dir, "one", 1000), started(config) as process:
        wait_until(lambda: read_notice(config.run_dir) is not None, "a notice")
        history = History.of(config.output_dir, "one", 1000)
        history.refresh()
        assert "each rollout has the reward 1 (environment toy)" in history.advice_without_difference
        command = history.advice_without_difference.rpartition("counterpoint show ")[2].split()
        assert show(command) == 0
        process.terminate()
        assert process.wait(DEADLINE_SECONDS) == 143
    said = capsys.readouterr().out
    assert said.count("reward 1, advantage +0") == EXAMPLES
    assert said.count("example ") >= EXAMPLES
    assert "show no difference" in (config.run_dir / "orchestrator.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("give_up_after", "code"), [(40, 65), (0, None)])
def test_a_run_that_learns_nothing_ends_with_a_code_of_its_own(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, give_up_after: int, code: int | None
) -> None:
    monkeypatch.setattr(differences_module, "GIVE_UP_SECONDS", 0.0)
    schedule = ScheduleConfig(group_size=4, rollouts_per_step=64, max_inflight_rollouts=64, give_up_after=give_up_after)
    config = make_config(args={"fault": "dull", "turns": 1}, schedule=schedule, steps=1000)
    with ScriptedTrainer(config.output_dir, "one", 1000):
        if code is None:
            with started(config) as process:
                wait_until(lambda: (found := read_notice(config.run_dir)) is not None and found.groups > 40, "a notice")
                process.terminate()
                assert process.wait(DEADLINE_SECONDS) == 143
            return
        assert run(config, lambda: None) == code
    said = (config.run_dir / "orchestrator.log").read_text()
    assert f"schedule.give_up_after = {give_up_after}" in said
    assert "each rollout has the reward 1 (environment toy)" in said
    assert "Traceback" not in said
