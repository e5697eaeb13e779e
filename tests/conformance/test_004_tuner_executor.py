"""Document 004, the executor: one that a user wrote from the page runs under our runner, and ours are driven by its calls."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint import tune
from counterpoint.tune import Checkpoint, LocalTrialExecutor, Resources, Trial, TrialExecutor, TrialRunner
from tests.conformance.thread_executor import ThreadExecutor
from tests.tune.executors.trainables import Counter, Resettable

COUNTER, RESETTABLE = "tests.tune.executors.trainables:Counter", "tests.tune.executors.trainables:Resettable"

DOCUMENTED = {
    "set_status": ["trial", "status"],
    "try_checkpoint_metadata": ["trial"],
    "get_checkpoints": [],
    "has_resources": ["resources"],
    "start_trial": ["trial", "checkpoint", "train"],
    "stop_trial": ["trial", "error", "error_msg", "stop_logger"],
    "continue_training": ["trial"],
    "pause_trial": ["trial"],
    "unpause_trial": ["trial"],
    "resume_trial": ["trial"],
    "reset_trial": ["trial", "new_config", "new_experiment_tag"],
    "get_running_trials": [],
    "on_step_begin": ["trial_runner"],
    "on_step_end": ["trial_runner"],
    "get_next_available_trial": [],
    "get_next_failed_trial": [],
    "fetch_result": ["trial"],
    "debug_string": [],
    "resource_string": [],
    "restore": ["trial", "checkpoint", "block"],
    "save": ["trial", "storage", "result"],
    "export_trial_if_needed": ["trial"],
    "has_gpus": [],
    "cleanup": ["trial"],
}


def parameters(function: Any) -> dict[str, Any]:
    """The names and defaults of a method's parameters."""
    return {name: each.default for name, each in inspect.signature(function).parameters.items() if name != "self"}


@pytest.mark.parametrize("kind", ["TrialExecutor", "RayTrialExecutor", "LocalTrialExecutor"])
def test_every_executor_has_the_24_methods_with_their_parameters(kind: str) -> None:
    executor = getattr(tune, kind)
    for name, expected in DOCUMENTED.items():
        assert list(parameters(getattr(executor, name)))[: len(expected)] == expected, name
    assert parameters(executor.start_trial) == {"trial": inspect.Parameter.empty, "checkpoint": None, "train": True}
    assert parameters(executor.restore)["block"] is False
    assert parameters(executor.save)["storage"] == "persistent" == tune.Checkpoint.PERSISTENT
    assert parameters(executor.reset_trial)["logger_creator"] is None


def test_the_executor_of_ray_has_its_parameters_with_their_defaults() -> None:
    defaults = {"queue_trials": False, "reuse_actors": False, "ray_auto_init": None, "refresh_period": 0.5}
    assert dict(list(parameters(tune.RayTrialExecutor.__init__).items())[:4]) == defaults
    assert parameters(TrialExecutor.__init__) == {"queue_trials": False}
    assert issubclass(tune.RayTrialExecutor, TrialExecutor)


# --- a user's executor under our runner ---


def counted(config: dict[str, Any], number: int) -> dict[str, Any]:
    """Counts, and ends after three steps; raises where it is told to."""
    if config.get("raises") == number:
        raise ZeroDivisionError(f"at {number}")
    return {"loss": config.get("begin", 0) + number, "done": number == 3}


def run(executor: TrialExecutor, directory: Path, trials: list[Trial], **arguments: Any) -> TrialRunner:
    """Runs trials to their ends."""
    runner = TrialRunner(trial_executor=executor, local_checkpoint_dir=directory, verbose=0, **arguments)
    for trial in trials:
        runner.add_trial(trial)
    try:
        while not runner.is_finished():
            runner.step()
    finally:
        runner.close()
    return runner


def test_an_executor_written_from_the_page_runs_an_experiment(tmp_path: Path) -> None:
    executor = ThreadExecutor(counted)
    trials = [
        Trial("mine", {"begin": 10 * number}, f"t{number}", str(tmp_path), export_formats=["model"])
        for number in range(5)
    ]
    runner = run(executor, tmp_path, trials)
    assert [(trial.status, trial.last_result["loss"]) for trial in runner.get_trials()] == [
        (Trial.TERMINATED, 10 * number + 3) for number in range(5)
    ]
    assert executor.calls.count("continue t0") == 3
    assert executor.calls.index("export t0") < executor.calls.index("stop t0") < executor.calls.index("cleanup t0")
    assert any(call.startswith("step of") for call in executor.calls)
    assert {json.loads(kept)["status"] for kept in executor.get_checkpoints().values()} == {Trial.TERMINATED}
    assert not executor.running
    assert len(executor.threads) == 1, "it is called from one thread, one call at a time"


def test_what_a_users_executor_raises_is_a_failure_that_is_retried_from_its_checkpoint(tmp_path: Path) -> None:
    failed: list[int] = []

    def once(config: dict[str, Any], number: int) -> dict[str, Any]:
        if number == 3 and not failed:
            failed.append(number)
            raise OSError("a node is gone")
        return {"loss": number, "done": number == 4}

    executor = ThreadExecutor(once)
    [trial] = run(
        executor, tmp_path, [Trial("mine", {}, "t", str(tmp_path), checkpoint_freq=2, max_failures=1)]
    ).get_trials()
    assert (trial.status, trial.num_failures, trial.last_result["training_iteration"]) == (Trial.TERMINATED, 1, 4)
    assert "save persistent t" in executor.calls
    assert executor.calls.count("restore t") == 1
    assert "a node is gone" in Path(trial.logdir, "error.txt").read_text()


def test_a_users_executor_may_keep_states_as_objects(tmp_path: Path) -> None:
    class AsObjects(ThreadExecutor):
        def save(self, trial: Trial, storage: str = "persistent", result: Any = None) -> Any:
            return {"steps": self.steps[trial.trial_id]}

        def restore(self, trial: Trial, checkpoint: Any = None, block: bool = False) -> bool:
            self._called("restore", trial)
            self.steps[trial.trial_id] = checkpoint["steps"]
            return True

    executor = AsObjects(counted, places=1)
    trials = [Trial("mine", {}, name, str(tmp_path)) for name in ("a", "b")]
    runner = run(executor, tmp_path, trials, scheduler=PausesOnce())
    assert [(trial.status, trial.num_results) for trial in runner.get_trials()] == [(Trial.TERMINATED, 3)] * 2
    assert executor.calls.count("restore a") == 1


def test_fail_fast_raise_raises_what_fetch_result_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="at 2"):
        run(ThreadExecutor(counted), tmp_path, [Trial("mine", {"raises": 2}, "t", str(tmp_path))], fail_fast="raise")


def test_a_trial_that_its_executor_calls_lost_has_failed(tmp_path: Path) -> None:
    class Loses(ThreadExecutor):
        def continue_training(self, trial: Trial) -> None:
            self.lost.append(trial)

    [trial] = run(Loses(counted), tmp_path, [Trial("mine", {}, "t", str(tmp_path))]).get_trials()
    assert trial.status == Trial.ERROR
    assert "get_next_failed_trial" in str(trial.error_msg)


def test_what_does_not_run_and_is_called_lost_keeps_nobody_waiting(tmp_path: Path) -> None:
    class Insists(ThreadExecutor):
        def get_next_failed_trial(self) -> Trial | None:
            return Trial("mine", {}, "of another experiment", str(tmp_path))

    [trial] = run(Insists(counted), tmp_path, [Trial("mine", {}, "t", str(tmp_path))]).get_trials()
    assert trial.status == Trial.TERMINATED


class OutOfTurns(tune.Stopper):
    """Raises after some steps."""

    turns = 3

    def stop_all(self) -> bool:
        self.turns -= 1
        if self.turns < 0:
            raise TimeoutError
        return False


@pytest.mark.slow
def test_what_never_fits_a_users_executor_is_an_error_unless_trials_are_queued(tmp_path: Path) -> None:
    large = Trial("mine", {}, "large", str(tmp_path), resources=Resources(cpu=3))
    small = Trial("mine", {}, "small", str(tmp_path))
    runner = run(ThreadExecutor(counted), tmp_path, [small, large])
    assert {trial.trial_id: trial.status for trial in runner.get_trials()} == {"small": "TERMINATED", "large": "ERROR"}
    assert "'cpu': 3.0" in str(large.error_msg)

    waits = Trial("mine", {}, "waits", str(tmp_path / "queued"), resources=Resources(cpu=3))
    with pytest.raises(TimeoutError):
        run(ThreadExecutor(counted, queue_trials=True), tmp_path / "queued", [waits], stopper=OutOfTurns())
    assert waits.status == Trial.PENDING


class PausesOnce(tune.TrialScheduler):
    """Pauses each trial after its first result."""

    def on_trial_result(self, trials: Any, trial: Trial, result: dict[str, Any]) -> str:
        return self.PAUSE if result["training_iteration"] == 1 else self.CONTINUE


def test_a_users_executor_pauses_and_resumes_through_the_base_class(tmp_path: Path) -> None:
    executor = ThreadExecutor(counted, places=1)
    trials = [Trial("mine", {}, name, str(tmp_path)) for name in ("a", "b")]
    runner = run(executor, tmp_path, trials, scheduler=PausesOnce())
    assert [(trial.status, trial.num_results) for trial in runner.get_trials()] == [(Trial.TERMINATED, 3)] * 2
    assert executor.calls.count("restore a") == 1
    assert executor.calls.index("start b") < executor.calls.index("restore a")


class DropsThePaused(tune.TrialScheduler):
    """Pauses the first trial, and ends it when the second reports."""

    def on_trial_result(self, trials: Any, trial: Trial, result: dict[str, Any]) -> str:
        if trial.trial_id == "a":
            return self.PAUSE
        trials.stop_trial(trials.get_trial("a"))
        return self.CONTINUE


def test_a_paused_trial_that_is_ended_is_stopped_in_a_users_executor(tmp_path: Path) -> None:
    class Parks(ThreadExecutor):
        """Keeps something of a trial while it is paused."""

        def pause_trial(self, trial: Trial) -> None:
            self._called("pause", trial)
            self.set_status(trial, Trial.PAUSED)

    executor = Parks(counted)
    trials = [Trial("mine", {}, name, str(tmp_path)) for name in ("a", "b")]
    runner = run(executor, tmp_path, trials, scheduler=DropsThePaused())
    assert {trial.status for trial in runner.get_trials()} == {Trial.TERMINATED}
    assert [call for call in executor.calls if call in ("pause a", "stop a")] == ["pause a", "stop a"]
    assert not executor.running
    assert json.loads(executor.get_checkpoints()["a"])["status"] == Trial.TERMINATED


class ExploitsOnce(tune.TrialScheduler):
    """The second trial takes the first one's checkpoint over after its first result."""

    def __init__(self, in_place: bool) -> None:
        self.in_place, self.source = in_place, None

    def on_trial_result(self, trials: Any, trial: Trial, result: dict[str, Any]) -> str:
        if trial.trial_id == "a" and result["training_iteration"] == 2:
            self.source = trials.save_trial(trial, result)
        elif trial.trial_id == "b" and self.source is not None:
            source, self.source = self.source, None
            trials.exploit(trial, source, {"begin": 100, "in_place": self.in_place}, "taken")
            return self.NOOP
        return self.CONTINUE


@pytest.mark.parametrize("in_place", [True, False])
def test_a_users_executor_takes_another_trials_state_over(tmp_path: Path, in_place: bool) -> None:
    executor = ThreadExecutor(lambda config, number: {"loss": config.get("begin", 0) + number, "done": number == 9})
    trials = [Trial("mine", {}, name, str(tmp_path)) for name in ("a", "b")]
    runner = run(executor, tmp_path, trials, scheduler=ExploitsOnce(in_place))
    second = runner.get_trial("b")
    assert second is not None
    assert (second.status, second.last_result["loss"], second.experiment_tag) == (Trial.TERMINATED, 109, "taken")
    assert "reset taken b" in executor.calls
    assert executor.calls.count("start b") == (1 if in_place else 2)


# --- our executor, driven by the calls ---


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
    killed, raises = trial_of(tmp_path), trial_of(tmp_path, "tests.conformance.test_004_tuner_executor:fails")
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
    trial, base = Trial("nothing"), TrialExecutor(queue_trials=True)
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
