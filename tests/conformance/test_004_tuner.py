"""Document 004: the runner, trials, callbacks, resources and the registry, called as the page describes them."""

from __future__ import annotations

import inspect
import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from counterpoint import tune
from counterpoint.tune import (
    BasicVariantGenerator,
    Callback,
    ExportFormat,
    LocalTrialExecutor,
    Resources,
    Searcher,
    SearchGenerator,
    Trial,
    TrialRunner,
    TuneError,
    env_creator,
)
from counterpoint.tune.runner.experiment_server import TOKENS
from counterpoint.tune.runner.search_thread import SearchThread
from tests.support.polling import wait_until
from tests.tune.runner.scripted import ScriptedExecutor

HERE = "tests.conformance.test_004_tuner"

TRIAL = {
    "trainable_name": inspect.Parameter.empty,
    "config": None,
    "trial_id": None,
    "local_dir": "~/counterpoint_results",
    "evaluated_params": None,
    "experiment_tag": "",
    "resources": None,
    "stopping_criterion": None,
    "remote_checkpoint_dir": None,
    "checkpoint_freq": 0,
    "checkpoint_at_end": False,
    "sync_on_checkpoint": True,
    "keep_checkpoints_num": None,
    "checkpoint_score_attr": "training_iteration",
    "export_formats": None,
    "restore_path": None,
    "trial_name_creator": None,
    "trial_dirname_creator": None,
    "loggers": None,
    "log_to_file": None,
    "sync_to_driver_fn": None,
    "max_failures": 0,
}

RUNNER = {
    "search_alg": None,
    "scheduler": None,
    "local_checkpoint_dir": None,
    "remote_checkpoint_dir": None,
    "sync_to_cloud": None,
    "stopper": None,
    "resume": False,
    "server_port": None,
    "fail_fast": False,
    "verbose": True,
    "checkpoint_period": None,
    "trial_executor": None,
    "callbacks": None,
    "metric": None,
}

HOOKS = (
    "on_step_begin",
    "on_step_end",
    "on_trial_start",
    "on_trial_restore",
    "on_trial_save",
    "on_trial_result",
    "on_trial_complete",
    "on_trial_fail",
)


def train(config: dict[str, Any]) -> None:
    """The trainable of the document's example."""
    for i in range(10):
        tune.report(metric=i)


class Saves(tune.Trainable):
    """Counts, and can be saved; `fails_at` raises once."""

    def setup(self, config: dict[str, Any]) -> None:
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"count": self.count, "done": self.count == 3}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {"count": self.count}

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.count = checkpoint["count"]

    def export_model(self, export_formats: Any, export_dir: str) -> dict[str, str]:
        paths = {each: str(Path(export_dir, f"model.{each}")) for each in export_formats}
        for path in paths.values():
            Path(path).write_text(str(self.count))
        return paths


class OwnError(Exception):
    """Raised by a trainable of this module."""


def raises(config: dict[str, Any]) -> None:
    """Fails with an error of its own."""
    raise OwnError("too warm", 40)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is not left to others: with a closure, each runner forks."""
    for names in ("_closures", "_trainables", "_environments"):
        monkeypatch.setattr(f"counterpoint.tune.registry.{names}", {})


@contextmanager
def stepped(**arguments: Any) -> Iterator[TrialRunner]:
    """A runner that is closed at the end."""
    runner = TrialRunner(verbose=False, **arguments)
    try:
        yield runner
    finally:
        runner.close()


def to_the_end(runner: TrialRunner) -> list[Trial]:
    """Steps until all trials have ended."""
    while not runner.is_finished():
        runner.step()
    return runner.get_trials()


# --- signatures ---


def test_trial_and_runner_have_the_documents_parameters_in_its_order() -> None:
    trial = {name: each.default for name, each in inspect.signature(Trial).parameters.items()}
    assert list(trial.items())[: len(TRIAL)] == list(TRIAL.items())
    assert len(TRIAL) == 22
    runner = {name: each.default for name, each in inspect.signature(TrialRunner).parameters.items()}
    assert runner == RUNNER
    for name in HOOKS:
        hook = list(inspect.signature(getattr(Callback, name)).parameters.values())
        assert [each.name for each in hook[1:3]] == ["iteration", "trials"], name
        assert hook[-1].kind is inspect.Parameter.VAR_KEYWORD
    registered = {name: each.default for name, each in inspect.signature(tune.register_trainable).parameters.items()}
    assert registered == {"name": inspect.Parameter.empty, "trainable": inspect.Parameter.empty, "warn": True}
    assert list(inspect.signature(tune.register_env).parameters) == ["name", "env_creator"]


def test_every_name_of_the_document_is_in_the_package() -> None:
    for name in [
        "TrialRunner",
        "Trial",
        "TrialExecutor",
        "RayTrialExecutor",
        "SearchAlg",
        "TrialScheduler",
        "Trainable",
        "Callback",
        "Resources",
        "register_trainable",
        "register_env",
        "run",
        "report",
        "Checkpoint",
        "AbortTrialExecution",
        "Stopper",
        "FIFOScheduler",
        "ExportFormat",
    ]:
        assert getattr(tune, name) is not None
        assert name in dir(tune)


class Listens(Searcher):
    """Suggests what is to happen, and keeps what it hears."""

    def __init__(self, scripts: list[list[Any]]) -> None:
        super().__init__("value", "max")
        self.scripts = scripts
        self.heard: dict[str, list[Any]] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        if len(self.heard) == len(self.scripts):
            return self.FINISHED
        self.heard[trial_id] = []
        return {"script": self.scripts[len(self.heard) - 1]}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.heard[trial_id].append(result["value"])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.heard[trial_id].append(("error" if error else "complete", result and result["value"]))

    def state(self) -> dict[str, Any]:
        return {}


def test_a_search_hears_of_every_step_error_and_completion(tmp_path: Path) -> None:
    searcher = Listens([[1, 2, 3], [4, "die"], ["die"]])
    algorithm = SearchGenerator(searcher)
    algorithm.add_configurations([tune.Experiment("one", "module:scripted", num_samples=9, local_dir=str(tmp_path))])
    with stepped(search_alg=algorithm, local_checkpoint_dir=tmp_path, trial_executor=ScriptedExecutor()) as runner:
        to_the_end(runner)
    assert list(searcher.heard.values()) == [
        [1, 2, 3, ("complete", 3)],
        [4, ("error", 4)],
        [("error", None)],
    ]


# --- the example ---


@pytest.mark.slow
def test_the_callback_of_the_document_prints_each_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class MyCallback(Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Trial, result: Any, **info: Any) -> None:
            print(f"Got result: {result['metric']}")

    tune.run(train, callbacks=[MyCallback()], local_dir=str(tmp_path), verbose=0)
    assert capsys.readouterr().out.splitlines() == [f"Got result: {i}" for i in range(10)]


# --- trials ---


def test_a_trial_has_the_documents_attributes_and_states(tmp_path: Path) -> None:
    trial = Trial("module:train")
    assert (trial.config, trial.evaluated_params, trial.stopping_criterion, trial.export_formats) == ({}, {}, {}, [])
    assert trial.resources == Resources(cpu=1)
    assert len(trial.trial_id) == 8
    assert trial.trial_id != Trial("module:train").trial_id
    assert trial.logdir == str(Path("~/counterpoint_results").expanduser() / trial.trial_id)
    assert (trial.status, trial.error_file) == ("PENDING", None)
    assert Trial.STATUSES == ("PENDING", "RUNNING", "PAUSED", "TERMINATED", "ERROR")
    named = Trial(
        "module:train",
        trial_id="t",
        local_dir=str(tmp_path),
        trial_name_creator=lambda trial: f"name_{trial.trial_id}",
        trial_dirname_creator=lambda trial: f"in_{trial}",
    )
    assert (str(named), named.logdir) == ("name_t", str(tmp_path / "in_name_t"))
    with pytest.raises(TuneError, match="trial_name_creator returned 'a/b'"):
        Trial("module:train", trial_name_creator=lambda trial: "a/b")


@pytest.mark.slow
@pytest.mark.parametrize("at_each_checkpoint", [True, False])
def test_a_trials_directory_is_copied_and_synced(tmp_path: Path, at_each_checkpoint: bool) -> None:
    synced: list[tuple[str, str]] = []
    trial = Trial(
        f"{HERE}:Saves",
        trial_id="t",
        local_dir=str(tmp_path / "here"),
        remote_checkpoint_dir=str(tmp_path / "there"),
        checkpoint_freq=1,
        sync_on_checkpoint=at_each_checkpoint,
        sync_to_driver_fn=lambda source, target: synced.append((source, target)),
    )
    with stepped(trial_executor=LocalTrialExecutor(cpus=1)) as runner:
        runner.add_trial(trial)
        assert to_the_end(runner) == [trial]
    assert len(list((tmp_path / "there" / "Saves_t").glob("checkpoint_*/tune_metadata.json"))) == 3
    assert synced == [(trial.logdir, trial.logdir)] * (4 if at_each_checkpoint else 1)


@pytest.mark.slow
def test_a_trial_begins_from_its_restore_path(tmp_path: Path) -> None:
    first = Trial(
        f"{HERE}:Saves", trial_id="a", local_dir=str(tmp_path), stopping_criterion={"count": 2}, checkpoint_at_end=True
    )
    with stepped() as runner:
        runner.add_trial(first)
        to_the_end(runner)
        assert first.checkpoint is not None
        second = Trial(f"{HERE}:Saves", trial_id="b", local_dir=str(tmp_path), restore_path=first.checkpoint.path)
        runner.add_trial(second)
        to_the_end(runner)
    assert (second.last_result["count"], second.num_results) == (3, 1)


# --- the runner ---


@pytest.mark.slow
def test_a_runner_without_arguments_runs_what_is_added(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runner = TrialRunner()
    try:
        trial = Trial(f"{HERE}:train", trial_id="t", local_dir=str(tmp_path))
        runner.add_trial(trial)
        assert to_the_end(runner) == [trial]
        assert (trial.status, trial.last_result["metric"]) == ("TERMINATED", 9)
        assert runner.get_trial("t") is trial
        with pytest.raises(TuneError, match="the id 't' already"):
            runner.add_trial(Trial(f"{HERE}:train", trial_id="t", local_dir=str(tmp_path)))
    finally:
        runner.close()


@pytest.mark.slow
def test_added_trials_are_journalled_and_resumed(tmp_path: Path) -> None:
    with stepped(trial_executor=LocalTrialExecutor(cpus=1), local_checkpoint_dir=tmp_path) as runner:
        runner.add_trial(Trial(f"{HERE}:Saves", trial_id="t", local_dir=str(tmp_path)))
        runner.step()
    with stepped(trial_executor=LocalTrialExecutor(cpus=1), local_checkpoint_dir=tmp_path, resume=True) as runner:
        assert [(trial.trial_id, trial.status) for trial in to_the_end(runner)] == [("t", "TERMINATED")]


@pytest.mark.slow
def test_server_port_starts_the_experiments_api_and_ends_it_with_the_runner(tmp_path: Path) -> None:
    with stepped(trial_executor=LocalTrialExecutor(cpus=1), local_checkpoint_dir=tmp_path, server_port=0) as runner:
        runner.add_trial(Trial(f"{HERE}:Saves", trial_id="t", local_dir=str(tmp_path)))
        to_the_end(runner)
        runner.checkpoint(force=True)
        assert runner._server is not None
        url, process = runner._server.url, runner._server._process
        token = (tmp_path / TOKENS / "read.token").read_text().strip()

        def asked(path: str) -> Any:
            request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.load(response)

        found = asked(f"api/v1/jobs/{tmp_path.name}/population")
        assert [(trial["trial_id"], trial["status"]) for trial in found["trials"]] == [("t", "TERMINATED")]
        with pytest.raises(TuneError, match="server_port"):
            TrialRunner(local_checkpoint_dir=tmp_path / "other", server_port=int(url.rpartition(":")[2].strip("/")))
    assert process.code is not None
    with pytest.raises(TuneError, match="no local_checkpoint_dir"):
        TrialRunner(server_port=0)


@pytest.mark.slow
def test_fail_fast_raise_raises_the_trainables_own_exception(tmp_path: Path) -> None:
    with pytest.raises(OwnError) as raised:
        tune.run(raises, local_dir=str(tmp_path), name="a", verbose=0, fail_fast="raise")
    assert raised.value.args == ("too warm", 40)
    assert "raise OwnError" in str(raised.value.__cause__), "with the traceback in the trial's process"
    with pytest.raises(TuneError, match="1 of 2 trials failed"):
        tune.run(
            raises,
            num_samples=2,
            local_dir=str(tmp_path),
            name="b",
            verbose=0,
            fail_fast=True,
            trial_executor=LocalTrialExecutor(cpus=1),
        )


# --- exports ---


@pytest.mark.slow
def test_formats_are_exported_and_unknown_ones_and_functions_refused(tmp_path: Path) -> None:
    assert [each.value for each in ExportFormat] == ["checkpoint", "model", "onnx", "h5"]
    for refused in (lambda: Trial("m:f", export_formats=["pickle"]), lambda: tune.run(Saves, export_formats=["tar"])):
        with pytest.raises(TuneError, match="export_formats: there is no format"):
            refused()
    [trial] = tune.run(Saves, local_dir=str(tmp_path), name="a", verbose=0, export_formats=[ExportFormat.MODEL]).trials
    assert Path(trial.logdir, "model.model").read_text() == "3"
    with pytest.raises(TuneError, match="train exports nothing"):
        tune.run(train, local_dir=str(tmp_path), name="b", verbose=0, export_formats=["model"])


# --- the registry ---


def _sent_without_a_copy() -> int:
    """How many bytes came out of a pair of sockets that a mebibyte was put into, once pyzmq has let go of it."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        address = f"inproc://{os.getpid()}"
        ours.bind(address)
        theirs.connect(address)
        sent = ours.send(bytes(1 << 20), copy=False, track=True)
        received = len(theirs.recv())
        sent.wait(60)
        return received


@pytest.fixture
def can_fork() -> None:
    """Skips where pytest-rerunfailures has a thread in this process, as without processes of pytest-xdist (`-n 0`)."""
    if any("run_server" in thread.name for thread in threading.enumerate()):
        pytest.skip("a thread of pytest-rerunfailures is at work here; give -n 1 or more")


@pytest.mark.slow
@pytest.mark.usefixtures("can_fork")
def test_lambdas_and_closures_run_in_forked_processes(tmp_path: Path) -> None:
    offset, here = 5, os.getpid()
    SearchThread(BasicVariantGenerator(), 0, lambda: None)  # idle, as of an experiment that nobody closed
    assert _sent_without_a_copy() == 1 << 20  # by which pyzmq has a thread from now on

    def closes_over(config: dict[str, Any]) -> None:
        tune.report(value=config["x"] + offset, same_process=os.getpid() == here, sent=_sent_without_a_copy())

    found = tune.run(
        closes_over, config={"x": tune.grid_search([1, 2])}, local_dir=str(tmp_path), name="a", verbose=0
    ).trials
    assert [(trial.last_result["value"], trial.last_result["same_process"]) for trial in found] == [
        (6, False),
        (7, False),
    ]
    assert [trial.last_result["sent"] for trial in found] == [1 << 20, 1 << 20]
    tune.register_trainable("by-lambda", lambda config, reporter: reporter(value=offset * 2), warn=False)
    tune.register_env("room", lambda config: {"size": config["size"] + offset})

    def uses_the_room(config: dict[str, Any]) -> None:
        tune.report(value=env_creator("room")({"size": 1})["size"])

    for trainable, value in (("by-lambda", 10), (uses_the_room, 6)):
        [trial] = tune.run(trainable, local_dir=str(tmp_path), verbose=0).trials
        assert trial.last_result["value"] == value


@pytest.mark.slow
@pytest.mark.usefixtures("can_fork")
def test_a_closure_is_refused_with_the_reason_where_no_fork_is_possible(tmp_path: Path) -> None:
    tune.register_trainable("inner", lambda config: None, warn=False)
    done = threading.Event()
    other = threading.Thread(target=lambda: [None for _ in iter(done.is_set, True)], name="in the way")
    other.start()
    try:
        with pytest.raises(TuneError, match="a thread at work: in the way"):
            tune.run("inner", local_dir=str(tmp_path), verbose=0, fail_fast="raise")
    finally:
        done.set()
        other.join()
    from counterpoint.tune.registry import why_not_imported

    assert "a lambda of" in why_not_imported("closure:inner")


@pytest.mark.slow
@pytest.mark.usefixtures("can_fork")
def test_the_processes_of_closures_end_with_the_runner(tmp_path: Path) -> None:
    pids: list[int] = []

    class Notes(Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Trial, result: Any, **info: Any) -> None:
            pids.append(result["pid"])

    def reports_once(config: dict[str, Any]) -> None:
        tune.report(value=1)

    tune.run(reports_once, num_samples=3, local_dir=str(tmp_path), verbose=0, callbacks=[Notes()])
    assert len(pids) == 3
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the ends of the trials' processes")


def test_a_name_that_is_given_again_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    tune.register_trainable("twice", train)
    tune.register_trainable("twice", train)
    assert not caplog.records
    tune.register_trainable("twice", Saves, warn=False)
    assert not caplog.records
    tune.register_trainable("twice", train)
    assert f"'twice' was {HERE}:Saves" in caplog.text
    with pytest.raises(TuneError, match="neither a class nor a function"):
        tune.register_trainable("number", 3)  # type: ignore[arg-type]
