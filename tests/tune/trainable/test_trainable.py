"""Classes and functions without an executor: what `train`, `save`, `restore`, `reset` and `stop` do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint import tune
from counterpoint.tune.errors import TuneError
from counterpoint.tune.trainable.functions import FunctionEnded, FunctionTrainable, trainable_class
from counterpoint.tune.trainable.session import open_session
from counterpoint.tune.trainable.trainable import TrialInfo
from tests.tune.executors import trainables


@pytest.fixture(autouse=True)
def _no_session_afterwards() -> Iterator[None]:
    yield
    open_session(None)


class Steps(tune.Trainable):
    """Reports what its config says, and keeps its state in a dict."""

    def setup(self, config: dict[str, Any]) -> None:
        self.state: dict[str, Any] = {"steps": 0}

    def step(self) -> dict[str, Any]:
        self.state["steps"] += 1
        return dict(self.config.get("result", {}))

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return self.state

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.state = checkpoint


def trial(directory: Path) -> TrialInfo:
    return TrialInfo("abc", "trial_abc", str(directory))


def function_trainable(function: Callable[..., Any], directory: Path, **config: Any) -> tune.Trainable:
    return trainable_class(function, "here:function")(config, trial(directory))


def test_counters_are_filled_in_and_survive_a_restore(tmp_path: Path) -> None:
    config = {"result": {"timesteps_this_iter": 10, "episodes_this_iter": 2, "time_this_iter_s": 1.5, "pid": 3}}
    first = Steps(config, trial(tmp_path))
    first.train()
    result = first.train()
    assert [result["timesteps_total"], result["episodes_total"], result["time_total_s"]] == [20, 4, 3.0]
    assert result["done"] is False
    path = first.save()
    assert path == str(tmp_path / "checkpoint_000002")
    assert first.save() == path

    second = Steps(config, trial(tmp_path))
    second.restore(path)
    assert [second.iteration, second.state] == [2, {"steps": 2}]
    result = second.train()
    assert [result["training_iteration"], result["iterations_since_restore"]] == [3, 1]
    assert [result["timesteps_total"], result["timesteps_since_restore"]] == [30, 10]
    assert [result["episodes_total"], result["time_total_s"], result["time_since_restore"]] == [6, 4.5, 1.5]
    assert second.get_state()["iteration"] == 3


def test_without_increments_there_are_no_totals() -> None:
    assert [Steps({}).train()[name] for name in ("timesteps_total", "episodes_total")] == [None, None], "as in Ray Tune"
    assert Steps({"result": {"timesteps_total": 7}}).train()["timesteps_total"] == 7


def test_a_checkpoint_is_replaced_after_another_step(tmp_path: Path) -> None:
    steps = Steps({}, trial(tmp_path))
    path = steps.save(str(tmp_path / "it"))
    steps.train()
    assert steps.save(path) == path
    other = Steps({})
    other.restore(path)
    assert other.state == {"steps": 1}


class Wrong(Steps):
    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        Path(checkpoint_dir, "half").touch()
        return self.config["returned"]


@pytest.mark.parametrize("returned", ["/etc/passwd", "../up", "missing", {"x": {1, 2}}])
def test_a_checkpoint_that_cannot_be_read_back_is_refused_and_leaves_nothing(tmp_path: Path, returned: object) -> None:
    wrong = Wrong({"returned": returned}, trial(tmp_path))
    with pytest.raises(TuneError):
        wrong.save()
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="is no checkpoint of a trainable"):
        Steps({}).restore(str(tmp_path))
    (tmp_path / "tune_metadata.json").write_text('{"iteration": 1}')
    with pytest.raises(TuneError, match="was not written by the tuner"):
        Steps({}).restore(str(tmp_path))


def test_a_class_without_what_is_asked_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"Trainable defines no step\(\)"):
        tune.Trainable().train()
    with pytest.raises(NotImplementedError, match="defines no load_checkpoint"):
        trainables.CannotSave().load_checkpoint({})


def test_a_step_must_return_a_dict() -> None:
    class Odd(tune.Trainable):
        def step(self) -> Any:
            return 7

    with pytest.raises(TypeError, match="returned a int"):
        Odd().train()


def test_a_function_works_between_its_reports(tmp_path: Path) -> None:
    it = function_trainable(trainables.reports, tmp_path, times=2)
    assert [it.train()["value"], it.train()["value"]] == [0, 1]
    with pytest.raises(FunctionEnded):
        it.train()
    it.stop()


def test_a_function_is_ended_at_its_report(tmp_path: Path) -> None:
    said = []

    def tidy(config: dict[str, Any]) -> None:
        try:
            while True:
                tune.report(one=1)
        finally:
            said.append(tune.get_trial_dir())

    it = function_trainable(tidy, tmp_path)
    it.train()
    it.stop()
    assert said == [str(tmp_path)]
    assert "trainable" not in {thread.name for thread in threading.enumerate()}
    assert tune.get_trial_id() is None


def test_what_a_function_returns_is_its_last_result(tmp_path: Path) -> None:
    for returned, expected in (({"loss": 1.0}, {"loss": 1.0}), (3, {"_metric": 3})):
        it = function_trainable(lambda config, returned=returned: returned, tmp_path)
        assert expected.items() <= it.train().items()
        with pytest.raises(FunctionEnded):
            it.train()
    it = function_trainable(lambda config: "text", tmp_path)
    with pytest.raises(TuneError, match="returned a str"):
        it.train()


def test_only_the_functions_own_thread_reports(tmp_path: Path) -> None:
    raised: list[str] = []

    def elsewhere() -> None:
        try:
            tune.report(one=1)
        except TuneError as error:
            raised.append(str(error))

    def starts(config: dict[str, Any]) -> None:
        other = threading.Thread(target=elsewhere, name="other")
        other.start()
        other.join()
        tune.report(0.5)

    it = function_trainable(starts, tmp_path)
    assert it.train()["_metric"] == 0.5
    assert "thread 'other'" in raised[0]
    it.stop()


def test_a_dict_that_is_reported_as_one_value_is_refused() -> None:
    with pytest.raises(TuneError, match=r"\['loss'\]; write tune.report\(\*\*metrics\)"):
        tune.report({"loss": 1.0})


def test_a_function_that_takes_no_checkpoint_cannot_be_restored(tmp_path: Path) -> None:
    counts = function_trainable(trainables.counts, tmp_path)
    counts.train()
    counts.train()
    assert isinstance(counts, FunctionTrainable)
    assert counts.made is not None
    assert counts.made.match(f"{tmp_path}/checkpoint_000002-*")
    with pytest.raises(TuneError, match="has begun cannot be restored"):
        counts.restore(str(counts.made))
    counts.stop()
    with pytest.raises(TuneError, match="it takes no checkpoint_dir"):
        function_trainable(trainables.reports, tmp_path).restore(str(counts.made))


def test_a_function_that_comes_to_an_iteration_again_makes_another_checkpoint(tmp_path: Path) -> None:
    """The former may be about to be deleted: a copy elsewhere can delay that for minutes."""
    made = set[Path]()
    for _ in range(2):
        counts = function_trainable(trainables.counts, tmp_path)
        assert isinstance(counts, FunctionTrainable)
        counts.train()
        counts.train()
        assert counts.made is not None
        made.add(counts.made)
        counts.stop()
    assert made == set(tmp_path.glob("checkpoint_000002*"))
    assert len(made) == 2


def test_outside_a_trial_a_report_is_logged_and_a_checkpoint_refused(caplog: pytest.LogCaptureFixture) -> None:
    tune.report(loss=1.0)
    assert "outside a trial" in caplog.text
    with pytest.raises(TuneError, match="outside a trial's function"), tune.checkpoint_dir(step=1):
        pass


@pytest.mark.parametrize("target", [7, dict, object])
def test_what_is_no_trainable_is_refused(target: object) -> None:
    with pytest.raises(TuneError, match="neither a function nor a class derived"):
        trainable_class(target, "here:it")
