"""Document 004, the executor: its methods, and one that a user wrote from the page under our runner."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint import tune
from counterpoint.tune import Resources, Trial, TrialExecutor
from tests.conformance.thread_executor import ThreadExecutor, run

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


def test_an_executor_written_from_the_page_runs_an_experiment(tmp_path: Path) -> None:
    executor = ThreadExecutor(counted)
    trials = [
        Trial("m:mine", {"begin": 10 * number}, f"t{number}", str(tmp_path), export_formats=["model"])
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
        executor, tmp_path, [Trial("m:mine", {}, "t", str(tmp_path), checkpoint_freq=2, max_failures=1)]
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
    trials = [Trial("m:mine", {}, name, str(tmp_path)) for name in ("a", "b")]
    runner = run(executor, tmp_path, trials, scheduler=PausesOnce())
    assert [(trial.status, trial.num_results) for trial in runner.get_trials()] == [(Trial.TERMINATED, 3)] * 2
    assert executor.calls.count("restore a") == 1


def test_fail_fast_raise_raises_what_fetch_result_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="at 2"):
        run(ThreadExecutor(counted), tmp_path, [Trial("m:mine", {"raises": 2}, "t", str(tmp_path))], fail_fast="raise")


def test_a_trial_that_its_executor_calls_lost_has_failed(tmp_path: Path) -> None:
    class Loses(ThreadExecutor):
        def continue_training(self, trial: Trial) -> None:
            self.lost.append(trial)

    [trial] = run(Loses(counted), tmp_path, [Trial("m:mine", {}, "t", str(tmp_path))]).get_trials()
    assert trial.status == Trial.ERROR
    assert "get_next_failed_trial" in str(trial.error_msg)


def test_what_does_not_run_and_is_called_lost_keeps_nobody_waiting(tmp_path: Path) -> None:
    class Insists(ThreadExecutor):
        def get_next_failed_trial(self) -> Trial | None:
            return Trial("m:mine", {}, "of-another-experiment", str(tmp_path))

    [trial] = run(Insists(counted), tmp_path, [Trial("m:mine", {}, "t", str(tmp_path))]).get_trials()
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
    large = Trial("m:mine", {}, "large", str(tmp_path), resources=Resources(cpu=3))
    small = Trial("m:mine", {}, "small", str(tmp_path))
    runner = run(ThreadExecutor(counted), tmp_path, [small, large])
    assert {trial.trial_id: trial.status for trial in runner.get_trials()} == {"small": "TERMINATED", "large": "ERROR"}
    assert "'cpu': 3.0" in str(large.error_msg)

    waits = Trial("m:mine", {}, "waits", str(tmp_path / "queued"), resources=Resources(cpu=3))
    with pytest.raises(TimeoutError):
        run(ThreadExecutor(counted, queue_trials=True), tmp_path / "queued", [waits], stopper=OutOfTurns())
    assert waits.status == Trial.PENDING


class PausesOnce(tune.TrialScheduler):
    """Pauses each trial after its first result."""

    def on_trial_result(self, trials: Any, trial: Trial, result: dict[str, Any]) -> str:
        return self.PAUSE if result["training_iteration"] == 1 else self.CONTINUE


def test_a_users_executor_pauses_and_resumes_through_the_base_class(tmp_path: Path) -> None:
    executor = ThreadExecutor(counted, places=1)
    trials = [Trial("m:mine", {}, name, str(tmp_path)) for name in ("a", "b")]
    runner = run(executor, tmp_path, trials, scheduler=PausesOnce())
    assert [(trial.status, trial.num_results) for trial in runner.get_trials()] == [(Trial.TERMINATED, 3)] * 2
    assert executor.calls.count("restore a") == 1
    assert executor.calls.index("start b") < executor.calls.index("restore a")
    assert executor.calls.count("save persistent a") == 1


def test_a_users_executor_may_report_numbers_of_numpy(tmp_path: Path) -> None:
    def step(config: dict[str, Any], number: int) -> dict[str, Any]:
        return {"loss": np.float32(0.5), "rows": np.int64(number), "done": np.bool_(number == 2)}

    [trial] = run(ThreadExecutor(step), tmp_path, [Trial("m:mine", {}, "t", str(tmp_path))]).get_trials()
    assert (trial.status, trial.num_results) == (Trial.TERMINATED, 2)
    assert trial.last_result == {"loss": 0.5, "rows": 2, "done": True, "training_iteration": 2}
    assert type(trial.last_result["rows"]) is int


def test_iterations_that_do_not_grow_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(ThreadExecutor):
        def fetch_result(self, trial: Trial) -> dict[str, Any]:
            return super().fetch_result(trial) | {"training_iteration": 1}

    [trial] = run(Stuck(counted), tmp_path, [Trial("m:mine", {}, "t", str(tmp_path))]).get_trials()
    assert trial.num_results == 1
    warned = [record.message for record in caplog.records if "training_iteration 1" in record.message]
    assert len(warned) == 1
    assert str(trial) in warned[0]


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
    trials = [Trial("m:mine", {}, name, str(tmp_path)) for name in ("a", "b")]
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
    trials = [Trial("m:mine", {}, name, str(tmp_path)) for name in ("a", "b")]
    runner = run(executor, tmp_path, trials, scheduler=ExploitsOnce(in_place))
    second = runner.get_trial("b")
    assert second is not None
    assert (second.status, second.last_result["loss"], second.experiment_tag) == (Trial.TERMINATED, 109, "taken")
    assert "reset taken b" in executor.calls
    assert executor.calls.count("start b") == (1 if in_place else 2)
