"""Document 004, the executor: ours is driven by the page's calls, without a runner."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint import tune
from counterpoint.tune import Checkpoint, LocalTrialExecutor, Resources, Trial, TrialExecutor
from tests.conformance.test_004_tuner_executor import DOCUMENTED as CALLS
from tests.conformance.thread_executor import run
from tests.tune.executors.trainables import Counter, Resettable

COUNTER, RESETTABLE = "tests.tune.executors.trainables:Counter", "tests.tune.executors.trainables:Resettable"


@pytest.fixture
def executor() -> Iterator[LocalTrialExecutor]:
    made = LocalTrialExecutor(cpus=2)
    yield made
    made.cleanup()


def trial_of(directory: Path, trainable: str = COUNTER, **fields: Any) -> Trial:
    """A trial of the tests' trainables."""
    return Trial(trainable, fields.pop("config", {}), local_dir=str(directory), **fields)


def result_of(executor: TrialExecutor, trial: Trial) -> dict[str, Any]:
    """The next result of the only trial that works."""
    assert executor.get_next_available_trial() is trial
    return executor.fetch_result(trial)


@pytest.mark.slow
def test_our_executor_is_driven_by_the_calls(executor: LocalTrialExecutor, tmp_path: Path) -> None:
    trial = trial_of(tmp_path, config={"begin": 5}, export_formats=["model"])
    assert executor.has_resources(Resources(cpu=2))
    executor.start_trial(trial)
    assert (trial.status, executor.get_running_trials()) == (Trial.RUNNING, [trial])
    assert not executor.has_resources(Resources(cpu=2))
    assert result_of(executor, trial)["count"] == 6
    executor.continue_training(trial)
    assert result_of(executor, trial)["count"] == 7
    assert executor.get_next_available_trial() is None, "nothing works"

    saved = executor.save(trial, storage=tune.Checkpoint.PERSISTENT)
    assert saved is not None
    assert (saved, saved.iteration, Path(saved.path).parent) == (trial.checkpoint, 2, Path(trial.logdir))
    assert set(executor.export_trial_if_needed(trial)) == {"model"}
    executor.continue_training(trial)
    assert result_of(executor, trial)["count"] == 8
    assert executor.restore(trial, saved, block=True)
    executor.continue_training(trial)
    assert result_of(executor, trial)["count"] == 8

    executor.stop_trial(trial)
    assert (trial.status, executor.get_running_trials()) == (Trial.TERMINATED, [])
    assert executor.has_resources(Resources(cpu=2))
    assert json.loads(executor.get_checkpoints()[trial.trial_id])["last_result"]["count"] == 8
    assert "cpu" in executor.debug_string()
    assert "cpu" in executor.resource_string()
    assert executor.has_gpus() is (executor.ledger.totals["gpu"] > 0)


@pytest.mark.slow
def test_a_pause_keeps_the_result_in_flight_and_a_resume_gives_it(executor: LocalTrialExecutor, tmp_path: Path) -> None:
    trial = trial_of(tmp_path)
    executor.start_trial(trial)
    executor.pause_trial(trial)
    assert (trial.status, executor.get_running_trials()) == (Trial.PAUSED, [])
    assert executor.has_resources(Resources(cpu=2))
    executor.unpause_trial(trial)
    assert trial.status == Trial.PENDING
    with pytest.raises(tune.TuneError, match="PENDING and cannot be resumed"):
        executor.resume_trial(trial)
    executor.set_status(trial, Trial.PAUSED)
    executor.resume_trial(trial)
    assert result_of(executor, trial)["count"] == 1
    executor.continue_training(trial)
    assert result_of(executor, trial)["count"] == 2


def test_what_does_not_run_cannot_be_continued(executor: LocalTrialExecutor, tmp_path: Path) -> None:
    """It would be waited for, and nothing would ever come."""
    with pytest.raises(tune.TuneError, match="cannot be continued"):
        executor.continue_training(trial_of(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("arrived", [True, False])
def test_a_restore_within_a_step_drops_its_result(
    executor: LocalTrialExecutor, tmp_path: Path, block: bool, arrived: bool
) -> None:
    """Whether the result has arrived or not."""
    trial = trial_of(tmp_path)
    executor.start_trial(trial)
    assert result_of(executor, trial)["count"] == 1
    saved = executor.save(trial)
    for expected in (2, 3):
        executor.continue_training(trial)
        assert result_of(executor, trial)["count"] == expected
    executor.continue_training(trial)
    if arrived:
        assert executor.get_next_available_trial() is trial
    assert executor.restore(trial, saved, block=block)
    assert executor.get_next_available_trial() is None, "it works towards nothing"
    executor.continue_training(trial)
    assert result_of(executor, trial)["count"] == 2


@pytest.mark.slow
def test_a_reset_within_a_step_drops_its_result(executor: LocalTrialExecutor, tmp_path: Path) -> None:
    trial = trial_of(tmp_path, RESETTABLE)
    executor.start_trial(trial)
    assert result_of(executor, trial)["count"] == 1
    saved = executor.save(trial)
    executor.continue_training(trial)
    assert executor.restore(trial, saved)  # not waited for: what says that it is done is no answer to what follows
    assert executor.reset_trial(trial, {"begin": 10}, "changed")
    executor.continue_training(trial)
    assert result_of(executor, trial)["count"] == 11
    executor.continue_training(trial)
    assert not executor.reset_trial(trial, {"begin": "x"}, "broken")
    assert trial.status == Trial.ERROR
    assert executor.get_next_available_trial() is None, "a trial that failed gives no result of before"
    with pytest.raises(tune.TuneError, match="no result"):
        executor.fetch_result(trial)


@pytest.mark.slow
def test_a_trial_is_reset_in_place(executor: LocalTrialExecutor, tmp_path: Path) -> None:
    plain, trial = trial_of(tmp_path), trial_of(tmp_path, RESETTABLE)
    for each in (plain, trial):
        executor.start_trial(each, train=False)
    assert executor.reset_trial(plain, {"begin": 1}, "new") is False
    assert executor.reset_trial(trial, {"begin": 10, "in_place": True}, "new") is True
    assert (trial.config["begin"], trial.experiment_tag) == (10, "new")
    executor.continue_training(trial)
    assert result_of(executor, trial)["count"] == 11
    with pytest.raises(tune.TuneError, match="loggers"):
        executor.reset_trial(trial, {}, "new", logger_creator=dict)


@pytest.mark.slow
def test_a_failed_trial_is_found_and_its_own_error_raised(executor: LocalTrialExecutor, tmp_path: Path) -> None:
    killed, raises = trial_of(tmp_path), trial_of(tmp_path, "tests.conformance.test_004_tuner_calls:fails")
    executor.start_trial(raises)
    assert executor.get_next_available_trial() is raises
    with pytest.raises(KeyError, match="no such thing"):
        executor.fetch_result(raises)
    assert (raises.status, executor.get_next_failed_trial()) == (Trial.ERROR, None)
    assert "no such thing" in Path(str(raises.error_file)).read_text()
    executor.start_trial(killed)
    pid = result_of(executor, killed)["pid"]
    os.kill(pid, 9)
    while (found := executor.get_next_failed_trial()) is None:
        pass
    assert (found, killed.status) == (killed, Trial.ERROR)
    assert "SIGKILL" in str(killed.error_msg)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_results_of_what_has_failed_are_no_longer_available(
    executor: LocalTrialExecutor, tmp_path: Path, again: bool
) -> None:
    trial = trial_of(tmp_path)
    executor.start_trial(trial)
    while not executor._ready:  # its result is known, and not fetched
        executor.get_next_failed_trial()
    os.kill(trial_pid(executor, trial), 9)
    while executor._driven[trial.trial_id].failed is None:
        executor.get_next_failed_trial()
    if again:
        executor.start_trial(trial, train=False)
    else:
        executor.cleanup(trial)
    assert executor.get_next_available_trial() is None


def trial_pid(executor: LocalTrialExecutor, trial: Trial) -> int:
    """The process of a trial, by the result that it has reported."""
    return int(executor._driven[trial.trial_id].results[0]["pid"])


@pytest.mark.slow
def test_a_stop_that_fails_raises_nothing_and_leaves_an_error(
    executor: LocalTrialExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trial_of(tmp_path)
    executor.start_trial(trial)

    def cannot(*_: Any) -> None:
        raise OSError("stuck")

    with monkeypatch.context() as patched:
        patched.setattr(executor, "end", cannot)
        executor.stop_trial(trial)
    assert trial.status == Trial.ERROR
    assert "could not be stopped in order: stuck" in Path(str(trial.error_file)).read_text()


def fails(config: dict[str, Any]) -> None:
    """A trainable that fails at once."""
    raise KeyError("no such thing")


@pytest.mark.slow
def test_what_cannot_be_restored_is_refused_as_documented(executor: LocalTrialExecutor, tmp_path: Path) -> None:
    trial = trial_of(tmp_path, "tests.tune.executors.trainables:reports")
    with pytest.raises(RuntimeError, match="no process"):
        executor.restore(trial, str(tmp_path))
    other = trial_of(tmp_path)
    executor.start_trial(other)
    result_of(executor, other)
    saved = executor.save(other, storage="memory")
    assert isinstance(saved, Checkpoint)
    executor.start_trial(trial, train=False)
    with pytest.raises(tune.AbortTrialExecution, match="takes no checkpoint_dir"):
        executor.restore(trial, saved, block=True)
    assert trial.status == Trial.ERROR
    with pytest.raises(tune.TuneError, match="storage = 'tape'"):
        executor.save(other, storage="tape")


@pytest.mark.slow
def test_a_function_trainable_ends_with_a_result_that_is_done(executor: LocalTrialExecutor, tmp_path: Path) -> None:
    trial = trial_of(tmp_path, "tests.tune.executors.trainables:reports", config={"times": 2})
    executor.start_trial(trial)
    heard = []
    while not (result := result_of(executor, trial))["done"]:
        heard.append(result)
        executor.continue_training(trial)
    assert len(heard) == 2
    executor.stop_trial(trial)


class Logged:
    """A logger as the document's `Trial.loggers` has it."""

    written: list[Any] = []

    def __init__(self, config: dict[str, Any], logdir: str, trial: Trial) -> None:
        self.name = Path(logdir).name

    def on_result(self, result: dict[str, Any]) -> None:
        self.written.append((self.name, result["count"]))

    def close(self) -> None:
        self.written.append((self.name, "closed"))


@pytest.mark.slow
def test_a_trials_loggers_hear_its_results_until_they_are_stopped(executor: LocalTrialExecutor, tmp_path: Path) -> None:
    Logged.written.clear()
    trial = trial_of(tmp_path, trial_id="t", loggers=[Logged])
    executor.start_trial(trial)
    result_of(executor, trial)
    executor.stop_trial(trial, stop_logger=False)
    assert Logged.written == [("t", 1)]
    executor.stop_trial(trial)
    assert Logged.written == [("t", 1), ("t", "closed")]
    own = LocalTrialExecutor(cpus=1)
    run(own, tmp_path, [trial_of(tmp_path, trial_id="u", loggers=[Logged], stopping_criterion={"count": 2})])
    assert Logged.written[-3:] == [("Counter_u", 1), ("Counter_u", 2), ("Counter_u", "closed")]


def test_the_base_class_says_what_is_missing() -> None:
    trial, base = Trial("m:nothing"), TrialExecutor(queue_trials=True)
    assert base.queue_trials
    for call in (base.start_trial, base.stop_trial, base.continue_training, base.fetch_result, base.save, base.restore):
        with pytest.raises(NotImplementedError, match="TrialExecutor does not define"):
            call(trial)
    with pytest.raises(ValueError, match="'DONE' is no status"):
        base.set_status(trial, "DONE")
    assert base.get_checkpoints() == {}
    base.try_checkpoint_metadata(trial)
    assert json.loads(base.get_checkpoints()[trial.trial_id])["status"] == Trial.PENDING
    assert {Counter, Resettable}, "the trainables that are named above"


class HandsOn(TrialExecutor):
    """Hands every call on to the executor of this machine."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = LocalTrialExecutor(cpus=2)

    def __getattribute__(self, name: str) -> Any:
        there = object.__getattribute__(self, "__dict__")
        return (
            getattr(there["ours"], name) if name in CALLS and "ours" in there else object.__getattribute__(self, name)
        )


@pytest.mark.slow
def test_an_executor_that_hands_its_calls_to_ours_loses_no_checkpoint(tmp_path: Path) -> None:
    trial = trial_of(tmp_path, trial_id="t", checkpoint_freq=1, stopping_criterion={"count": 3})
    runner = run(HandsOn(), tmp_path, [trial])
    [ended] = runner.get_trials()
    assert (ended.status, ended.num_results) == (Trial.TERMINATED, 3)
    assert [checkpoint.iteration for checkpoint in ended.checkpoints] == [1, 2, 3]
    again = trial_of(
        tmp_path / "again", trial_id="t", restore_path=ended.checkpoints[0].path, stopping_criterion={"count": 2}
    )
    [ended] = run(HandsOn(), tmp_path / "again", [again]).get_trials()
    assert (ended.last_result["count"], ended.num_results) == (2, 1)
