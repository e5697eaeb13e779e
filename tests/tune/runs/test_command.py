"""`counterpoint tune`: what its file may say, and an experiment over runs that pretend, killed and resumed as real processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from counterpoint.cli.main import main
from counterpoint.cli.tune import tune
from counterpoint.job.configuration.load import load
from counterpoint.transport.files.lock import LockHolder, take_lock
from counterpoint.tune.config import TuneConfig
from counterpoint.tune.file_experiment import FileExperiment
from counterpoint.tune.runner.journal import LOCK_NAME
from counterpoint.tune.runner.trial_files import STATE_FILE, write_state
from counterpoint.tune.runs.exploit import NOTE
from counterpoint.tune.trial import Trial
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.tune.runs.conftest import BASE, PretendedJob

STEPS = list(range(1, BASE["steps"] + 1))


class Command:
    """An experiment's file beside a job that pretends, and the commands about it."""

    def __init__(self, job: PretendedJob, directory: Path) -> None:
        self.job, self.file, self.directory = job, directory / "tune.toml", directory / "experiments" / "exp"
        self.settings: dict[str, Any] = {
            "name": "exp",
            "local_dir": str(directory / "experiments"),
            "executor": "runs",
            "num_samples": 3,
            "job": {"join": str(job.output)},
            "space": {"training": {"learning_rate": {"loguniform": [1e-4, 1e-2]}}},
            "run": BASE,
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def write(self) -> str:
        self.file.write_text(tomli_w.dumps(self.settings))
        return str(self.file)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.tune.runs.fake_tune", *words]
        with open(self.file.with_name("output.log"), "ab") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self.started.append(process)
        return process

    def output(self) -> str:
        return self.file.with_name("output.log").read_text()

    def steps(self) -> dict[str, list[int]]:
        """The iterations in each trial's `result.json`."""
        found = {}
        for file in self.directory.glob("*/result.json"):
            whole, _, _ = file.read_text().rpartition("\n")
            found[file.parent.name] = [json.loads(line)["training_iteration"] for line in whole.splitlines()]
        return found


@pytest.fixture
def command(job: PretendedJob, tmp_path: Path) -> Iterator[Command]:
    command = Command(job, tmp_path)
    yield command
    for process in command.started:
        process.kill()
        process.wait()
    wait_until(lambda: not job.orchestrators(), "the end of the orchestrators")


def test_an_experiment_that_runs_is_not_moved_aside(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    lock = take_lock(command.directory / LOCK_NAME, "")
    try:
        assert main(["tune", command.write(), "--fresh"]) == 2
    finally:
        os.close(lock)
    assert f"process {os.getpid()} on" in capsys.readouterr().err
    assert [path.name for path in command.directory.parent.iterdir()] == ["exp"]


def test_no_runner_begins_while_an_experiment_is_moved_aside(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on in what is moved, and write by its old path into the new experiment."""
    command.directory.mkdir(parents=True)
    rename, begun = Path.rename, list[str]()

    def renamed(path: Path, target: Path) -> Path:
        try:
            os.close(take_lock(command.directory / LOCK_NAME, "taken"))
        except OSError as error:
            begun.append(str(error.strerror))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    tune._move_aside(command.directory)
    assert begun == ["taken"]
    assert not command.directory.exists()


@pytest.mark.slow
def test_an_experiment_that_is_killed_goes_on_and_counts_nothing_twice(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    first = command.start(command.write())
    wait_until(lambda: any(command.steps().values()), "a result", details=command.output)
    first.kill()
    first.wait()
    second = command.start("resume", str(command.directory))
    assert second.wait(DEADLINE_SECONDS) == 0, command.output()
    assert list(command.steps().values()) == [STEPS] * 3
    assert "3 TERMINATED" in command.output()
    assert main(["tune", "status", str(command.directory), "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert [trial["iteration"] for trial in trials] == [6, 6, 6]
    assert main(["tune", "status", str(command.directory)]) == 0
    assert "best: " in capsys.readouterr().out

    assert main(["tune", command.write()]) == 2
    assert "holds this experiment already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_ends_it_in_order(command: Command) -> None:
    command.settings["run"] = BASE | {"steps": 1_000_000}
    process = command.start(command.write())
    wait_until(lambda: any(command.steps().values()), "a result", details=command.output)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM, command.output()
    assert f"counterpoint tune resume {command.directory}" in command.output()
    assert not command.job.orchestrators()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_sample": 3}, "the nearest is num_samples"),
        ({"mode": "maximum"}, "mode = 'maximum'"),
        ({"job": {}}, "give one of join"),
        ({"executor": "local"}, "needs trainable"),
        ({"trainable": "a:b"}, "a trial is a run"),
        ({"space": {"training": {"learning_rat": 0.1}}}, "the nearest is training.learning_rate"),
        ({"space": {"training": {"learning_rate": {"uniform": 1}}}}, "expected a list"),
        ({"space": {"training": {"learning_rate": {"loguniforn": [0.1, 1]}}}}, "the nearest is loguniform."),
        ({"space": {"training": {"learning_rate": {"loguniform": [-1.0, 1.0]}}}}, "space: training.learning_rate"),
        ({"space": {"training": {"learning_rate": {"uniform": [-2.0, -1.0]}}}}, "run with the first values of space"),
        ({"space": {"sampling": {"top_p": {"uniform": [0.5, 1.05]}}}}, "sampling.top_p may become 1.04"),
        ({"space": {"sampling": {"top_p": {"choice": [0.9] * 99 + [0]}}}}, "sampling.top_p may become 0,"),
        (
            {"space": {"environments": {"0": {"ratio": {"quniform": [0, 1, 0.5]}}}}},
            "environments.0.ratio may become 0.0",
        ),
        (
            {"scheduler": {"kind": "pbt", "mutations": {"schedule": {"group_size": {"uniform": [2, 9]}}}}},
            "schedule.group_size may become 2.0",
        ),
        ({"scheduler": {"kind": "pbt", "mutations": {"sampling": {"top_p": [0.9, 1.1]}}}}, "top_p may become 1.1"),
        ({"run": BASE | {"output_dir": "x"}}, "output_dir is set by the tuner"),
        ({"scheduler": {"kind": "pbd"}}, "expected one of"),
        ({"scheduler": {"kind": "fifo", "perturbation_interval": 4}}, "scheduler of this kind has no such key"),
        ({"scheduler": {"kind": "pbt", "mutations": {"seeed": [1]}}}, "scheduler.mutations.seeed"),
        ({"job": {"join": "/nowhere"}}, "there is no job"),
        ({"search": {"kind": "optuna"}, "space": {"seed": {"grid_search": [1, 2]}}}, "OptunaSearch has no space"),
    ],
)
def test_an_error_names_file_key_and_what_is_allowed(
    command: Command, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    command.settings |= change
    assert main(["tune", command.write(), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(command.file) in error or "/nowhere" in error


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"space": {"training": {"learning_rat": 0.1}}}, "learning_rat = 0.1"),
        ({"space": {"training": {"learning_rate": {"uniform": [2.0, 1.0]}}}}, "uniform = ["),
        ({"run": BASE | {"advantage": {"kind": "mean"}}}, 'kind = "mean"'),
    ],
)
def test_an_error_quotes_the_line(
    command: Command, capsys: pytest.CaptureFixture[str], change: dict[str, Any], line: str
) -> None:
    command.settings |= change
    number = Path(command.write()).read_text().split("\n").index(line) + 1
    assert main(["tune", str(command.file), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert f"{command.file}:{number}:1: " in error
    assert f"\n    {number} | {line}\n" in error


@pytest.mark.slow
def test_what_the_job_of_others_does_not_allow_is_refused_before_anything_starts(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "tests.orchestrator.toy_environment:Toy"
    command.settings["run"] = BASE | {"environments": [{"name": "x", "kind": kind}]}
    assert main(["tune", command.write(), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert kind in error
    assert "trainer.allowed_imports" in error
    assert str(command.file) in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run": BASE | {"advantage": {"kind": "nowhere:advantage"}}}, "advantage.kind = 'nowhere:advantage'"),
        (
            {"run": BASE | {"environments": [{"name": "x", "kind": "nowhere:X"}]}},
            "environments[0]: environment 'x': kind = ",
        ),
        (
            {"run": BASE | {"training": {"lora": {"rank": 4}, "loss": {"kind": "nowhere:loss"}}}},
            "training.loss.kind = 'nowhere:loss'",
        ),
        ({"space": {"advantage": {"kind": {"grid_search": ["group_mean", "nowhere:other"]}}}}, "'nowhere:other'"),
        ({"scheduler": {"kind": "pbt", "mutations": {"advantage": {"kind": ["nowhere:third"]}}}}, "'nowhere:third'"),
    ],
)
@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_what_is_named_by_import_path_is_loaded_before_anything_starts(
    command: Command, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str, words: list[str]
) -> None:
    command.settings |= change
    assert main(["tune", command.write(), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "No module named 'nowhere'" in error
    assert str(command.file) in error
    assert not command.directory.exists()


def test_what_a_trial_names_and_is_not_there_is_refused(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command.settings["run"] = BASE | {"training": {"lora": {"rank": 4, "start_from": "/gone"}}}
    assert main(["tune", command.write(), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "training.lora.start_from = '/gone': there is no adapter_config.json" in error
    assert str(command.file) in error


@pytest.mark.slow
def test_the_job_to_start_is_checked_as_run_does(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    job_file = command.file.with_name("trials.toml")
    job = {
        "output_dir": str(command.file.parent / "trials"),
        "model": "tiny-dense",
        "stay": True,
        "inference": {"max_model_len": 256},
        "trainer": {"max_tokens": 1024},
        "orchestrator": {"training": {"lora": {"rank": 4}}},
        "runs": [{"run_id": "own", **BASE, "advantage": {"kind": "nowhere:advantage"}}],
    }
    job_file.write_text(tomli_w.dumps(job))
    command.settings["job"] = {"file": str(job_file)}
    assert main(["tune", command.write()]) == 2
    error = capsys.readouterr().err
    assert f"counterpoint: error: {job_file}:" in error
    assert "run 'own': advantage.kind = 'nowhere:advantage'" in error
    job_file.write_text(tomli_w.dumps(job | {"model": "./gone"}))
    assert main(["tune", str(command.file), "--dry-run"]) == 2
    assert f"counterpoint: error: {job_file}:2:1: model = './gone': there is no such" in capsys.readouterr().err
    assert not command.directory.exists()


def test_the_reason_of_a_trial_with_a_wrong_configuration_is_shown(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "counterpoint: error: 1 error in the configuration\n  seed: the reason, SomeError: of it"
    program = f"import sys; print({said!r}); sys.exit(2)"
    monkeypatch.setattr("counterpoint.job.admin.orchestrator_process.PROGRAM", (sys.executable, "-c", program))
    command.settings |= {"num_samples": 1, "max_failures": 2}
    assert main(["tune", command.write()]) == 1
    reason = "ended with exit code 2; 1 error in the configuration seed: the reason, SomeError: of it"
    assert capsys.readouterr().out.count(reason) == 2, "when it fails, once, and below the table at the end"
    assert main(["tune", "status", str(command.directory)]) == 0
    assert reason in capsys.readouterr().out


@pytest.mark.slow
def test_trials_that_have_failed_for_good_run_again_when_asked(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command.settings |= {"num_samples": 2}
    with monkeypatch.context() as broken:
        broken.setattr(
            "counterpoint.job.admin.orchestrator_process.PROGRAM", (sys.executable, "-c", "import sys; sys.exit(1)")
        )
        assert main(["tune", command.write()]) == 1
    again = ["tune", "resume", str(command.directory)]
    said = f"2 of its trials failed; they run again with: counterpoint {' '.join(again)} --errored"
    assert said in capsys.readouterr().out
    assert main(again) == 1
    assert command.steps() == {}
    assert main([*again, "--errored"]) == 0
    assert list(command.steps().values()) == [STEPS] * 2
    assert "2 TERMINATED" in capsys.readouterr().out


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_optuna_proposes_runs(command: Command, capsys: pytest.CaptureFixture[str], sampler: str) -> None:
    command.settings |= {"search": {"kind": "optuna", "sampler": sampler}}
    assert main(["tune", command.write(), "--dry-run"]) == 0, capsys.readouterr().err
    experiment = FileExperiment(load(TuneConfig, command.file, []), command.file)
    (first,) = {trial.config["training"]["learning_rate"] for trial in [experiment._search().next_trial()] if trial}
    assert 1e-4 <= first <= 1e-2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trainable": "nowhere:x"}, "put its directory on PYTHONPATH"),
        pytest.param(
            {"trainable": "tests.tune.executors.trainables:reprots"},
            "tune.toml:4:1: trainable = 'tests.tune.executors.trainables:reprots': TuneError: ",
            marks=pytest.mark.slow,
        ),
        ({"search": {"kind": "optuna"}, "space": {"x": {"grid_search": [1]}, "y": {"uniform": [0, 1]}}}, "grid x"),
    ],
)
def test_a_trainable_without_a_job_is_checked_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    file = tmp_path / "tune.toml"
    settings = {"name": "exp", "local_dir": str(tmp_path), "trainable": "tests.tune.executors.trainables:reports"}
    settings["metric"] = "score"
    file.write_text(tomli_w.dumps({"executor": "local", **settings, **change}))
    assert main(["tune", str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_dry_run_prints_a_file_that_loads_to_the_same(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", command.write(), "--dry-run", "--num_samples", "5"]) == 0
    again = command.file.with_name("again.toml")
    again.write_text(capsys.readouterr().out)
    config = load(TuneConfig, again, [])
    assert config.num_samples == 5
    assert FileExperiment(config, again).directory == command.directory


def without_locks(path: Path) -> LockHolder | None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path))


def test_the_status_of_an_experiment_that_a_script_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [{"loss": loss, "training_iteration": 2} for loss in (0.25, 0.125)]
    trials = [Trial("run", {"x": 1.0}, f"t{number}", local_dir=str(tmp_path)) for number in (1, 2)]
    for trial, result in zip(trials, results, strict=True):
        trial.last_result = result
    write_state(tmp_path, trials, {"metric": "loss", "mode": "min"})
    assert main(["tune", "status", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "best: t2: loss 0.125 after 2" in output
    assert "no process runs it: it goes on with its script and resume='AUTO'" in output, "as after a kill"
    lock = take_lock(tmp_path / LOCK_NAME, "taken")
    assert main(["tune", "status", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "no process runs it" not in output
    assert "has written nothing" not in output
    os.utime(tmp_path / STATE_FILE, (0, 0))
    assert main(["tune", "status", str(tmp_path)]) == 0
    assert "its process has written nothing for" in capsys.readouterr().out
    assert main(["tune", "status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["running"] is True
    os.close(lock)
    monkeypatch.setattr("counterpoint.cli.tune.status.holder_of", without_locks)
    assert main(["tune", "status", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "process" not in output, "nobody knows"
    assert main(["tune", "status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["running"] is None
    assert main(["tune", "resume", str(tmp_path)]) == 2
    assert "resume='AUTO'" in capsys.readouterr().err


TRIAL: dict[str, Any] = {
    "trial_id": "t1",
    "status": "RUNNING",
    "logdir": "exp/t1",
    "config": {"x": 1.0},
    "evaluated_params": {"x": 1.0},
}
"""The keys that a trial has at least."""


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ([], "expected a JSON object, found list"),
        ({"processes": 3}, "trials is missing"),
        ({"trials": None}, "trials: expected a list, found None"),
        ({"trials": 3}, "trials: expected a list, found 3"),
        ({"trials": [3]}, "trials[0]: expected an object, found 3"),
        ({"trials": [TRIAL, {}]}, "trials[1].trial_id is missing"),
        ({"trials": [], "runner": {"metric": 3}}, "runner.metric: expected a valid string, found 3"),
        *(
            ({"trials": [TRIAL | {key: value}]}, f"trials[0].{key}: expected ")
            for key, value in (
                ("trial_id", 3),
                ("status", ["RUNNING"]),
                ("logdir", 3),
                ("config", 3),
                ("evaluated_params", [3]),
                ("last_result", "x"),
                ("num_failures", "x"),
                ("error_msg", 3),
            )
        ),
    ],
)
def test_the_status_of_an_experiment_names_a_damaged_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: object, said: str
) -> None:
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    for flags in ([], ["--json"]):
        assert main(["tune", "status", str(tmp_path), *flags]) == 2
        error = capsys.readouterr().err
        assert f"{tmp_path / STATE_FILE} is damaged: " in error
        assert said in error
        assert "a tuner that runs or is resumed writes it anew" in error


def test_the_status_of_an_experiment_shows_what_its_trials_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever they report as their seconds, and whatever is in the note of their copy."""
    (tmp_path / "t1").mkdir()
    for seconds in (None, "x", [3], True):
        trial = TRIAL | {"logdir": str(tmp_path / "t1"), "last_result": {"time_total_s": seconds, "loss": 0.5}}
        (tmp_path / STATE_FILE).write_text(json.dumps({"runner": {"metric": "loss"}, "trials": [trial]}))
        (tmp_path / "t1" / NOTE).write_text(json.dumps({"source": seconds, "iteration": 3, "request_id": "r"}))
        assert main(["tune", "status", str(tmp_path)]) == 0
        assert "best: t1: loss 0.500" in capsys.readouterr().out


def test_a_directory_without_an_experiment_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["resume", str(tmp_path)], ["status", str(tmp_path)]):
        assert main(["tune", *words]) == 2
        assert "tune.toml is missing" in capsys.readouterr().err
    assert main(["tune", "resume"]) == 2
    assert main(["tune", "status", "--help"]) == 0
    assert os.listdir(tmp_path) == []
