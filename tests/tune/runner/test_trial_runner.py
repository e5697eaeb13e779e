"""The runner with an executor of scripts: what its arguments mean, and what becomes of trials that go wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.callbacks.defaults import with_default_loggers
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.executor import Event
from counterpoint.tune.experiment import Experiment
from counterpoint.tune.result import Result
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.schedulers.scheduler import Trials, TrialScheduler
from counterpoint.tune.search.basic_variant import BasicVariantGenerator
from counterpoint.tune.search.generator import SearchGenerator
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.search.searcher import Searcher
from counterpoint.tune.search.wrappers import ConcurrencyLimiter
from counterpoint.tune.stoppers.stopper import Stopper
from counterpoint.tune.trial import Trial
from tests.tune.runner.scripted import ScriptedExecutor, ScriptedTrials, run_to_the_end


class Listener(Callback):
    """Remembers the names of the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_trial_start(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        self.calls.append(f"start {trial.trial_id}")

    def on_trial_restore(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        self.calls.append(f"restore {trial.trial_id}")

    def on_trial_save(self, iteration: int, trials: Any, trial: Trial, checkpoint: Any, **info: Any) -> None:
        self.calls.append(f"save {trial.trial_id} {checkpoint.iteration}")

    def on_trial_result(self, iteration: int, trials: Any, trial: Trial, result: Result, **info: Any) -> None:
        self.calls.append(f"result {trial.trial_id} {result['training_iteration']} number {info['number']}")

    def on_trial_recover(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        self.calls.append(f"recover {trial.trial_id}")

    def on_trial_complete(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        self.calls.append(f"complete {trial.trial_id}")

    def on_trial_fail(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        self.calls.append(f"fail {trial.trial_id}")


class Stops(Stopper):
    """Stops trials at a value, and all when one reaches another."""

    def __init__(self, at: float = math.inf, all_at: float = math.inf) -> None:
        self.at, self.all_at, self.most = at, all_at, -math.inf

    def __call__(self, trial_id: str, result: Result) -> bool:
        self.most = max(self.most, result["value"])
        return bool(result["value"] >= self.at)

    def stop_all(self) -> bool:
        return self.most >= self.all_at


def run(place: Path, scripts: list[list[Any]], executor: ScriptedExecutor | None = None, **arguments: Any) -> Any:
    fields = arguments.pop("fields", {})
    algorithm = ScriptedTrials(place, scripts, **fields)
    runner = TrialRunner(
        algorithm, local_checkpoint_dir=place, trial_executor=executor or ScriptedExecutor(), **arguments
    )
    return run_to_the_end(runner), algorithm


def lines_of(trial: Trial) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(trial.logdir) / "result.json").read_text().splitlines()]


def test_every_trial_runs_and_everyone_hears_of_it(tmp_path: Path) -> None:
    listener, executor = Listener(), ScriptedExecutor(slots=2)
    trials, algorithm = run(tmp_path, [[1, 2], [3], [4, 5, 6]], executor, callbacks=[listener])
    assert [trial.status for trial in trials.values()] == ["TERMINATED"] * 3
    assert [trial.last_result["value"] for trial in trials.values()] == [2, 3, 6]
    assert executor.most == 2
    assert algorithm.heard.count(["t3", 2]) == 1
    assert len([each for each in algorithm.heard if each[1] == "complete"]) == 3
    assert [call for call in listener.calls if "t1" in call] == [
        "start t1",
        "result t1 1 number 1",
        "result t1 2 number 2",
        "complete t1",
    ]


def test_somebody_outside_ends_one_trial_and_asks_for_what_is_free(tmp_path: Path) -> None:
    said: list[Any] = []

    class Ends(Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Trial, result: Result, **info: Any) -> None:
            if trial.trial_id == "t1":
                said.extend([runner.debug_string(), runner.has_resources(trial.resources)])
                runner.request_stop_trial(trial)

    algorithm = ScriptedTrials(tmp_path, [[1, 2, 3], [4, 5, 6]])
    runner = TrialRunner(
        algorithm, local_checkpoint_dir=tmp_path, trial_executor=ScriptedExecutor(slots=1), callbacks=[Ends()]
    )
    trials = run_to_the_end(runner)
    assert [trial.num_results for trial in trials.values()] == [1, 3]
    assert said[0].startswith("2 trials: 1 PENDING, 1 RUNNING\n1/1\n")
    assert said[1] is False
    runner.cleanup_trials()


def test_somebody_outside_ends_the_whole_experiment(tmp_path: Path) -> None:
    class Ends(Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Trial, result: Result, **info: Any) -> None:
            runner.request_stop_experiment()

    algorithm = ScriptedTrials(tmp_path, [[1, 2, 3], [4, 5, 6]])
    runner = TrialRunner(
        algorithm, local_checkpoint_dir=tmp_path, trial_executor=ScriptedExecutor(slots=1), callbacks=[Ends()]
    )
    trials = run_to_the_end(runner)
    assert (trials["t1"].status, trials["t1"].num_results) == ("TERMINATED", 1)
    assert sum(trial.num_results for trial in trials.values()) == 1


def test_a_trial_that_dies_resumes_from_its_newest_checkpoint_and_counts_nothing_twice(tmp_path: Path) -> None:
    listener, executor = Listener(), ScriptedExecutor()
    fields = {"max_failures": 1, "checkpoint_freq": 2}
    trials, algorithm = run(
        tmp_path, [[1, 2, 3, "die once", 5]], executor, callbacks=with_default_loggers([listener]), fields=fields
    )
    assert (trials["t1"].status, trials["t1"].num_failures, trials["t1"].num_results) == ("TERMINATED", 1, 5)
    assert [start[1:] for start in executor.started] == [(1, None), (2, "checkpoint_000002-1")]
    assert [call for call in listener.calls if call.startswith("result")] == [
        f"result t1 {number} number {number}" for number in range(1, 6)
    ]
    assert [line["training_iteration"] for line in lines_of(trials["t1"])] == [1, 2, 3, 4, 5]
    assert algorithm.heard == [["t1", number] for number in range(1, 6)] + [["t1", "complete"]]
    assert "Failure # 1" in (Path(trials["t1"].logdir) / "error.txt").read_text()


def test_a_trial_fails_for_good_beyond_max_failures_and_the_others_go_on(tmp_path: Path) -> None:
    listener = Listener()
    trials, algorithm = run(tmp_path, [["die"], [1, 2]], callbacks=[listener], fields={"max_failures": 2})
    assert (trials["t1"].status, trials["t1"].num_failures) == ("ERROR", 3)
    assert trials["t2"].status == "TERMINATED"
    assert ["t1", "error"] in algorithm.heard
    assert listener.calls.count("recover t1") == 2
    assert listener.calls.count("fail t1") == 1
    text = Path(trials["t1"].error_file).read_text()
    assert text.count("it died at 1") == 3


@pytest.mark.parametrize(
    ("step", "words"), [("nothing", "has no 'value'"), ("odd", "is no data"), ("much", "a str; expected a number")]
)
def test_a_result_that_cannot_be_used_is_a_failure_of_its_trial_alone(tmp_path: Path, step: str, words: str) -> None:
    trials, _ = run(tmp_path, [[1, step], [1, 2]], metric="value")
    assert [trial.status for trial in trials.values()] == ["ERROR", "TERMINATED"]
    assert words in Path(trials["t1"].error_file).read_text()


def test_first_results_without_the_metric_end_the_experiment(tmp_path: Path) -> None:
    """A misspelt name would otherwise fail each trial alone, after its start and its first result."""
    trials, _ = run(tmp_path, [[1] * 400 for _ in range(20)], metric="vlaue")
    assert {trial.status for trial in trials.values()} == {"ERROR"}, "they can run again"
    said = list(trials.values())[-1].error_msg
    assert "has no 'vlaue'" in said
    assert "the nearest is 'value'; it has value. No trial has reported it so far, so the experiment ends" in said
    assert {trial.num_results for trial in trials.values()} == {0}
    assert len(trials) < 20


@pytest.mark.parametrize("slots", [1, 2])
def test_one_odd_trial_that_reports_first_does_not_end_the_others(tmp_path: Path, slots: int) -> None:
    trials, _ = run(tmp_path, [["nothing"], [1, 2], [1, 2]], ScriptedExecutor(slots), metric="value")
    assert [trial.status for trial in trials.values()] == ["ERROR", "TERMINATED", "TERMINATED"]


def test_trials_that_ended_for_want_of_the_metric_run_again_on_request(tmp_path: Path) -> None:
    scripts = [["nothing"] for _ in range(4)]
    broken, _ = run(tmp_path, scripts, metric="value")
    assert {(trial.status, trial.num_results) for trial in broken.values()} == {("ERROR", 0)}
    runner = TrialRunner(
        ScriptedTrials(tmp_path, scripts),
        local_checkpoint_dir=tmp_path,
        trial_executor=ScriptedExecutor(),
        metric="value",
        resume="ERRORED_ONLY",
    )
    for trial in runner.get_trials():
        trial.config["script"] = [5]
    mended = run_to_the_end(runner).values()
    assert {(trial.status, trial.num_results, trial.num_failures) for trial in mended} == {("TERMINATED", 1, 0)}


@pytest.mark.parametrize("step", ["nothing", "much"])
def test_a_trial_whose_result_nobody_can_decide_on_does_not_start_again(tmp_path: Path, step: str) -> None:
    """It would report the same."""
    trials, _ = run(tmp_path, [[1, step, 3]], metric="value", fields={"max_failures": 2})
    assert (trials["t1"].status, trials["t1"].num_failures, trials["t1"].num_results) == ("ERROR", 1, 1)


def test_a_value_that_is_not_a_number_is_a_result_like_any_other(tmp_path: Path) -> None:
    trials, _ = run(tmp_path, [[1, "nan", 3]], metric="value", callbacks=with_default_loggers(None))
    assert trials["t1"].status == "TERMINATED"
    assert trials["t1"].num_results == 3


def test_stopping_criteria_and_stoppers_end_trials(tmp_path: Path) -> None:
    trials, _ = run(tmp_path / "a", [[1, 2, 3, 4]], fields={"stopping_criterion": {"training_iteration": 2}})
    assert trials["t1"].last_result["value"] == 2
    assert trials["t1"].last_result["done"] is True
    trials, _ = run(tmp_path / "b", [[1, 2, 3, 4], [9, 9]], stopper=Stops(at=3))
    assert [trial.last_result["value"] for trial in trials.values()] == [3, 9]


def test_a_stopper_ends_the_experiment(tmp_path: Path) -> None:
    trials, algorithm = run(tmp_path, [[1] * 400, [1, 2, 7, *[1] * 400], [1]], stopper=Stops(all_at=7))
    assert {trial.status for trial in trials.values()} == {"TERMINATED"}
    assert trials["t1"].num_results < 300
    assert len([each for each in algorithm.heard if each[1] == "complete"]) == len(trials)


def test_fail_fast_ends_all_and_raise_raises(tmp_path: Path) -> None:
    trials, _ = run(tmp_path / "a", [[1, "die"], [1] * 400], fail_fast=True)
    assert [trial.status for trial in trials.values()] == ["ERROR", "TERMINATED"]
    assert trials["t2"].num_results < 400
    with pytest.raises(TuneError, match="it died at 1"):
        run(tmp_path / "b", [["die"], [1] * 400], fail_fast="raise")


def test_only_the_best_checkpoints_and_the_newest_are_kept(tmp_path: Path) -> None:
    executor = ScriptedExecutor()
    fields = {
        "checkpoint_freq": 1,
        "keep_checkpoints_num": 2,
        "checkpoint_score_attr": "value",
        "checkpoint_at_end": True,
    }
    trials, _ = run(tmp_path, [[5, 1, 9, 2, 3]], executor, fields=fields)
    left = sorted(path.name for path in Path(trials["t1"].logdir).glob("checkpoint_*"))
    assert [checkpoint.iteration for checkpoint in trials["t1"].checkpoints] == [1, 3]
    newest = trials["t1"].checkpoint
    assert newest is not None
    assert left == sorted({Path(each.path).name for each in (*trials["t1"].checkpoints, newest)}), (
        "every other directory was deleted"
    )


def test_a_checkpoint_that_fails_ends_nothing(tmp_path: Path) -> None:
    executor = ScriptedExecutor()
    executor.saves = False
    trials, _ = run(tmp_path, [[1, 2]], executor, fields={"checkpoint_freq": 1, "checkpoint_at_end": True})
    assert (trials["t1"].status, trials["t1"].checkpoint) == ("TERMINATED", None)


@pytest.mark.slow
def test_what_can_never_run_is_an_error_that_says_why(tmp_path: Path) -> None:
    trials, _ = run(tmp_path, [[1], [2]], ScriptedExecutor(refuses="it needs 8 GPUs, and there are 0"))
    assert {trial.status for trial in trials.values()} == {"ERROR"}
    assert "8 GPUs" in Path(trials["t1"].error_file).read_text()


class Fails(TrialScheduler):
    """Cannot decide."""

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        raise ZeroDivisionError("no wheel")


class Sleeps(TrialScheduler):
    """Pauses every trial and wakes none."""

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        return self.PAUSE

    def choose_trial_to_run(self, trials: Trials) -> Trial | None:
        return trials.first_startable(Trial.PENDING)


def test_a_scheduler_that_fails_or_forgets_its_trials_ends_the_experiment(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match=r"(?s)scheduler Fails failed.*no wheel"):
        run(tmp_path / "a", [[1]], scheduler=Fails())
    with pytest.raises(TuneError, match="only paused trials are left"):
        run(tmp_path / "b", [[1], [2]], scheduler=Sleeps())


class Waits(ScriptedTrials):
    """Proposes two trials, and nothing more while they are unfinished."""

    def is_finished(self) -> bool:
        return False

    def next_trial(self) -> Trial | None:
        return super().next_trial() if self.made < len(self.scripts) else None


@pytest.mark.slow
def test_an_experiment_that_waits_for_a_search_that_waits_for_it_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = TrialRunner(
        Waits(tmp_path, [[1], [2]]), Sleeps(), local_checkpoint_dir=tmp_path, trial_executor=ScriptedExecutor()
    )
    try:
        while "only paused trials are left" not in caplog.text:
            runner.step()
        runner.step()
    finally:
        runner.close()
    assert caplog.text.count("only paused trials are left") == 1
    assert {trial.status for trial in runner.get_trials()} == {Trial.PAUSED}


class Breaks(ScriptedTrials):
    """Fails at its second proposal."""

    def next_trial(self) -> Trial | None:
        if self.made == 1:
            raise ZeroDivisionError("no model")
        return super().next_trial()


def test_a_search_algorithm_that_fails_ends_the_experiment(tmp_path: Path) -> None:
    runner = TrialRunner(Breaks(tmp_path, [[1], [2]]), local_checkpoint_dir=tmp_path, trial_executor=ScriptedExecutor())
    with pytest.raises(TuneError, match="search algorithm Breaks failed: ZeroDivisionError: no model"):
        run_to_the_end(runner)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fail_fast": "sometimes"}, "fail_fast = 'sometimes'"),
        ({"server_port": 70000}, "server_port = 70000"),
        ({"resume": "MAYBE"}, "resume = 'MAYBE'"),
        ({"callbacks": [print]}, "expected an instance of Callback"),
        ({"scheduler": "asha"}, "scheduler is 'asha'"),
        ({"stopper": lambda trial_id, result: True}, "FunctionStopper"),
        ({"trial_executor": "ray"}, "trial_executor is 'ray'"),
        ({"metric": ["value"]}, "metric is"),
        ({"checkpoint_period": -1}, "checkpoint_period = -1"),
        ({"search_alg": Searcher("value", "max")}, "SearchGenerator"),
        ({"resume": True}, "there is no experiment in"),
        ({"resume": "REMOTE"}, "no remote_checkpoint_dir"),
        ({"remote_checkpoint_dir": "s3://bucket/name"}, "sync_to_cloud"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"trial_executor": ScriptedExecutor(), "local_checkpoint_dir": tmp_path}
    with pytest.raises(TuneError, match=words):
        TrialRunner(**{"search_alg": ScriptedTrials(tmp_path, []), **given, **arguments})


def test_what_is_no_trial_is_not_added(tmp_path: Path) -> None:
    runner = TrialRunner(trial_executor=ScriptedExecutor(), local_checkpoint_dir=tmp_path)
    with pytest.raises(TuneError, match="expected an instance of Trial"):
        runner.add_trial({"script": [1]})  # type: ignore[arg-type]
    runner.close()


class Trips(Stopper):
    """Cannot say."""

    def __call__(self, trial_id: str, result: Result) -> bool:
        raise ValueError("no clock")


def test_a_stopper_that_fails_ends_the_experiment(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="the stopper Trips failed: ValueError: no clock"):
        run(tmp_path, [[1]], stopper=Trips())


class Wakes(TrialScheduler):
    """Pauses the first trial from outside while it trains, and wakes it once the second has ended."""

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        if trial.trial_id == "t2" and result["value"] == 20:
            trials.pause_trial(trials.get_trial("t1"))
        return self.CONTINUE

    def on_trial_complete(self, trials: Trials, trial: Trial, result: Result) -> None:
        if trial.trial_id == "t2":
            trials.unpause_trial(trials.get_trial("t1"))


def test_a_result_in_flight_when_its_trial_is_paused_is_delivered_after_the_resume(tmp_path: Path) -> None:
    listener, executor = Listener(), ScriptedExecutor()
    trials, algorithm = run(
        tmp_path, [[1, 2, 3, 4, 5], [10, 20, 30, 40]], executor, scheduler=Wakes(), callbacks=[listener]
    )
    assert {trial.status for trial in trials.values()} == {"TERMINATED"}
    assert [each for trial_id, each in algorithm.heard if trial_id == "t1"] == [1, 2, 3, 4, 5, "complete"]
    assert [start[0] for start in executor.started].count("t1") == 2
    resumed = listener.calls.index("restore t1")
    paused_at = int(next(call for call in listener.calls if call.startswith("save t1")).split()[2])
    held = f"result t1 {paused_at} number {paused_at}"
    assert listener.calls.index(held) > resumed, "it was reported before the pause"


class SlowlyCleaned(ScriptedExecutor):
    """Has resources for all, and takes some turns to end an attempt, which holds its process for as long."""

    def __init__(self) -> None:
        super().__init__(slots=100)
        self._ending: list[tuple[int, Trial]] = []
        self._turn = 0

    def end(self, trial: Trial, error: bool = False) -> None:
        self._ending.append((self._turn + 20, trial))

    async def next_events(self, timeout: float) -> Sequence[Event]:
        self._turn += 1
        for due, trial in [each for each in self._ending if each[0] <= self._turn]:
            self._ending.remove((due, trial))
            super().end(trial)
        return await super().next_events(min(timeout, 0.001))


@pytest.mark.parametrize("kind", ["variants", "limiter"])
def test_max_concurrent_bounds_processes_also_while_they_are_cleaned_up(tmp_path: Path, kind: str) -> None:
    class OneValue(Searcher):
        def suggest(self, trial_id: str) -> dict[str, Any]:
            return {"script": [1]}

        def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
            pass

        def state(self) -> dict[str, Any]:
            return {}

    algorithm: SearchAlg = (
        BasicVariantGenerator(max_concurrent=2)
        if kind == "variants"
        else SearchGenerator(ConcurrencyLimiter(OneValue("value", "max"), 2))
    )
    space = {"script": [1]} if kind == "variants" else {}
    algorithm.add_configurations(
        [Experiment("many", "module:scripted", config=space, num_samples=12, local_dir=str(tmp_path))]
    )
    executor = SlowlyCleaned()
    trials = run_to_the_end(TrialRunner(algorithm, local_checkpoint_dir=tmp_path, trial_executor=executor))
    assert [trial.status for trial in trials.values()] == [Trial.TERMINATED] * 12
    assert executor.most == 2
