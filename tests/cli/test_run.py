"""`counterpoint run` around workers that pretend: the directory, the files, the progress, the summary, the end."""

from __future__ import annotations

import json
import math
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import counterpoint.cli.run
from counterpoint.cli.run import _how_to_go_on, resuming_command
from counterpoint.cluster.attended.left_running import has_workers
from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_files import control_path, read_outcome
from counterpoint.cluster.manager.events import Outcome
from counterpoint.cluster.master.control import ask
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.directory import control_directory, is_running, orchestrator_of
from counterpoint.job.processes_file import read_workers
from counterpoint.job.reading.run_state import is_finished
from counterpoint.job.workers import specification
from counterpoint.job.write_job import write_job
from counterpoint.models import write_tokenizer
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint, identity_of, write_checkpoint
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.process.notify import NotifySocket
from tests.support.jobs import shipped_line
from tests.support.keepers import end_keepers
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.ports import free_port
from tests.transport.telemetry.scraping import families

pytestmark = pytest.mark.slow

REPETITION_SECONDS = 1.1
"""Between two signals: one within a second of another is taken for the same."""


class FakeJob:
    """Starts `counterpoint run` with pretending workers, and a model that nobody loads."""

    def __init__(self, job_file: Path, tmp_path: Path) -> None:
        self.output = tmp_path / "out"
        self.model = tmp_path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.model / "model.safetensors").touch()
        write_tokenizer(self.model, longest=1024)
        port = free_port()
        self.arguments = [str(job_file), "--model", str(self.model), "--inference.port", str(port)]
        self.started: list[subprocess.Popen[str]] = []

    def start(self, behaviour: str, *arguments: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.fake_job", behaviour, *self.arguments, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, behaviour: str, *arguments: str) -> tuple[int, str, str]:
        process = self.start(behaviour, *arguments)
        output, errors = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, output, errors

    def wait_for_steps(self, reader: int | None = None, count: int = 1) -> None:
        """Until so many steps; meanwhile empties `reader`, the other end of the job's output."""
        metrics = self.output / "run_test" / "metrics.jsonl"

        def has_steps() -> bool:
            if reader is not None and select.select([reader], [], [], 0)[0]:
                os.read(reader, 65536)
            return metrics.exists() and metrics.read_text().count("\n") >= count

        wait_until(has_steps, f"{count} steps")


@pytest.fixture
def job(job_file: Path, tmp_path: Path) -> Iterator[FakeJob]:
    fake = FakeJob(job_file, tmp_path)
    yield fake
    for process in fake.started:
        process.kill()
        process.communicate()
    end_keepers(control_directory(fake.output))


def test_a_job_runs_and_sums_up(job: FakeJob, job_file: Path) -> None:
    code, output, errors = job.run("finish,picture")
    assert (code, errors) == (0, "")
    for part in ("inference_0 ready after", "step 1/20", "step 20/20", "reward", "event loop lag", "curves.png"):
        assert part in output
    summary = json.loads((job.output / "summary.json").read_text())
    assert summary["outcome"] == "done"
    assert summary["steps"] == {"shipped": 20, "trained": 20, "wanted": 20, "counted_from": 1}
    assert summary["reward"]["first"] == pytest.approx(0.15)
    assert summary["reward"]["last"] == pytest.approx(0.9)
    assert summary["rollouts"]["completed"] == 20 * 64
    assert summary["event_loop_lag_seconds"]["max"] == pytest.approx(0.025)
    assert summary["mismatch_kl"]["max"] == pytest.approx(20e-6)
    assert (job.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (job.output / "job.toml").read_bytes() == job_file.read_bytes()
    resolved = json.loads((job.output / "job.json").read_text())
    assert resolved["orchestrator"]["model"] == str(job.model)
    trainer = load(TrainerConfig, job.output / "roles" / "trainer.toml", [])
    orchestrator = load(RunConfig, job.output / "roles" / "orchestrator.toml", [])
    assert trainer.output_dir == orchestrator.output_dir == job.output
    assert trainer.model == str(job.model)
    states = {
        worker["name"]: worker["state"] for worker in json.loads((job.output / "processes.json").read_text())["workers"]
    }
    assert set(states.values()) == {"stopped"}
    assert "--resume" not in output


def test_a_failure_is_explained_in_the_workers_own_words(job: FakeJob) -> None:
    code, _, errors = job.run("fail")
    assert code == 3
    assert "orchestrator ended with exit code 3" in errors
    assert "| the disk is full" in errors
    assert json.loads((job.output / "summary.json").read_text())["steps"]["shipped"] == 3


def test_a_killed_command_leaves_its_workers_to_the_next_one(job: FakeJob) -> None:
    first = job.start("hang")
    job.wait_for_steps(count=3)
    wait_until(lambda: views(job)[-1]["state"] == "ready", "the command to know it")
    first.kill()
    first.communicate()
    before = orchestrator_of(job.output, "test")
    assert before is not None
    seen = views(job)[-1]
    assert seen["name"] == "orchestrator"
    second = job.start("hang", "--resume")
    wait_until(
        lambda: views(job)[-1]["since"] > seen["since"] and views(job)[-1]["pid"], "the orchestrator to be adopted"
    )
    assert views(job)[-1]["pid"] == before.pid
    assert orchestrator_of(job.output, "test") == before
    second.send_signal(signal.SIGTERM)
    output, errors = second.communicate(timeout=DEADLINE_SECONDS)
    assert (second.returncode, errors) == (143, "")
    assert orchestrator_of(job.output, "test") is None
    assert "starting" not in output


def test_a_copy_of_a_running_jobs_directory_is_another_job(job: FakeJob, tmp_path: Path) -> None:
    first = job.start("hang")
    job.wait_for_steps(count=3)
    before = orchestrator_of(job.output, "test")
    copy = Path(
        shutil.copytree(job.output, tmp_path / "copy", ignore=lambda at, names: [n for n in names if ".sock" in n])
    )
    second = job.start("hang", "--resume", "--output-dir", str(copy), "--inference.port", str(free_port()))
    try:
        wait_until(lambda: orchestrator_of(copy, "test") is not None, "the copy's own run")
        assert orchestrator_of(job.output, "test") == before
        assert first.poll() is None
        second.kill()
        second.communicate()
    finally:
        end_keepers(control_directory(copy))
    assert orchestrator_of(job.output, "test") == before


def test_jobs_of_one_file_that_sets_no_port_run_at_once(
    job: FakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its port: when its file is read again, by a dry run beside it, and when it is resumed."""
    monkeypatch.setenv("PORTS_FROM", str(free_port()))
    job.arguments = job.arguments[: job.arguments.index("--inference.port")]
    outputs = [job.output, tmp_path / "another"]
    started = [job.start("hang,listen", "--output-dir", str(output)) for output in outputs]
    try:
        wait_until(lambda: all(orchestrator_of(output, "test") for output in outputs), "the runs, and so their servers")
        ports = [json.loads((output / "job.json").read_text())["inference"]["port"] for output in outputs]
        assert ports[0] != ports[1]
        for output, port in zip(outputs, ports, strict=True):
            assert load(RunConfig, output / "roles" / "orchestrator.toml", []).inference.urls == [
                f"http://127.0.0.1:{port}"
            ]
        code, shown, _ = job.run("", "--output-dir", str(outputs[1]), "--dry-run")
        assert (code, f"port = {ports[1]}" in shown) == (0, True)
        started[1].send_signal(signal.SIGHUP)
        assert started[1].stdout is not None
        deadline = threading.Timer(DEADLINE_SECONDS, started[1].kill)
        deadline.start()
        said = next((line for line in started[1].stdout if "SIGHUP" in line), "")
        deadline.cancel()
        deadline.join()
        assert "nothing that is known here has changed" in said
        for process in started:
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_SECONDS) == 143
        code, shown, errors = job.run("finish,listen", "--resume", "--output-dir", str(outputs[1]))
        assert code == 0, errors
        assert f"servers at http://127.0.0.1:{ports[1]}\n" in shown
        assert "changed since the last start" not in shown
    finally:
        end_keepers(control_directory(outputs[1]))


def test_a_run_that_was_stopped_while_its_command_was_dead_goes_on_with_resume(job: FakeJob) -> None:
    first = job.start("wait")
    job.wait_for_steps(count=3)
    first.kill()
    first.communicate()
    stopped = orchestrator_of(job.output, "test")
    assert stopped is not None
    os.kill(stopped.pid, signal.SIGTERM)
    wait_until(lambda: orchestrator_of(job.output, "test") is None, "the end of the run")
    (job.output / "run_test" / "control" / "go").touch()
    code, output, errors = job.run("wait", "--resume")
    assert (code, "orchestrator starting" in output) == (0, True), errors


def test_a_fresh_job_begins_after_the_end_of_what_a_killed_command_left(job: FakeJob) -> None:
    first = job.start("hang")
    job.wait_for_steps(count=3)
    first.kill()
    first.communicate()
    earlier = orchestrator_of(job.output, "test")
    assert earlier is not None
    second = job.start("hang", "--fresh")
    moved = job.output.with_name("out.1")
    wait_until(moved.exists, "the earlier job to be moved")
    assert not has_workers(control_directory(moved))
    assert not Path(f"/proc/{earlier.pid}").exists()
    ended = read_outcome(control_directory(moved))
    assert ended is not None
    assert ended.code == 143
    job.wait_for_steps(count=3)
    second.send_signal(signal.SIGTERM)
    output, errors = second.communicate(timeout=DEADLINE_SECONDS)
    assert (second.returncode, "moved the previous job" in output) == (143, True), errors


def test_sigterm_while_what_a_killed_command_left_is_stopped_ends_the_command(job: FakeJob) -> None:
    first = job.start("stubborn")
    job.wait_for_steps(count=3)
    first.kill()
    first.communicate()
    second = job.start("finish", "--fresh")
    wait_until(lambda: is_running(job.output), "the directory to be locked")
    wait_until(lambda: '"STOPPING"' in status_of(job) or second.poll() is not None, "the earlier job to be stopped")
    assert second.poll() is None
    sent = -math.inf

    def ended() -> bool:
        nonlocal sent
        if time.monotonic() - sent > REPETITION_SECONDS:
            second.send_signal(signal.SIGTERM)
            sent = time.monotonic()
        return second.poll() is not None

    wait_until(ended, "the end of the command")
    assert second.returncode in (143, -signal.SIGTERM), "a late one may meet no handler any more"
    assert not job.output.with_name("out.1").exists()
    assert not has_workers(control_directory(job.output))


def status_of(job: FakeJob) -> str:
    """What the master that stops the earlier job says of it."""
    try:
        return json.dumps(ask(control_path(control_directory(job.output)), {"ask": "status"}))
    except ClusterError:
        return ""


def views(job: FakeJob) -> list[dict[str, Any]]:
    return read_workers(job.output)


def test_a_directory_is_used_again_only_as_told(job: FakeJob) -> None:
    assert job.run("finish")[0] == 0
    before = (job.output / "run_test" / "metrics.jsonl").read_bytes()
    code, _, errors = job.run("finish")
    assert code == 2
    assert "--resume" in errors
    assert "--fresh" in errors
    assert (job.output / "run_test" / "metrics.jsonl").read_bytes() == before
    code, output, _ = job.run("finish", "--fresh")
    assert code == 0
    assert "moved the previous job" in output
    assert (job.output.with_name("out.1") / "run_test" / "metrics.jsonl").read_bytes() == before
    assert job.run("finish", "--resume")[0] == 0
    code, _, errors = job.run("finish", "--resume", "--orchestrator.run_id", "other")
    assert code == 2
    assert "began with run_id = 'test', and now it is 'other'" in errors


def publish_checkpoints(job: FakeJob, orchestrator: int, trainer: int) -> None:
    """As the roles do, which the pretending ones do not."""
    config = load(RunConfig, job.output / "roles" / "orchestrator.toml", [])
    write_checkpoint(config.run_dir, StepCheckpoint(orchestrator, identity_of(config), {}, {}, []), keep=1)
    with publish_directory(job.output / "trainer" / "test" / "checkpoints" / f"step_{trainer}"):
        pass


def test_a_finished_job_says_so_and_starts_nothing(job: FakeJob) -> None:
    assert job.run("finish")[0] == 0
    publish_checkpoints(job, orchestrator=20, trainer=20)
    before = (job.output / "summary.json").read_bytes()
    code, output, errors = job.run("fail", "--resume")
    assert (code, errors) == (0, "")
    assert "run 'test'" in output
    assert "is done: 20 of 20 steps. Raise orchestrator.steps to go on, or start anew with --fresh" in output
    assert "starting" not in output
    assert (job.output / "summary.json").read_bytes() == before
    code, output, errors = job.run("fail", "--resume", "--orchestrator.steps", "12")
    assert (code, errors) == (0, "")
    assert "is done: 20 steps, 12 asked for. Raise orchestrator.steps above 20 to go on" in " ".join(output.split())
    assert "orchestrator starting" in job.run("fail", "--resume", "--orchestrator.steps", "30")[1]


def test_a_finished_job_goes_on_for_a_guest_that_waits_for_its_return(job: FakeJob, job_file: Path) -> None:
    assert job.run("finish")[0] == 0
    publish_checkpoints(job, orchestrator=20, trainer=20)
    guest = take_lock(job.output / "run_visitor" / "orchestrator.lock", "taken")
    config = load(JobConfig, job.output / "job.toml", ["--model", str(job.model), "--resume", "true"])
    files = dict.fromkeys(("inference_0", "trainer"), job_file)
    assert [worker.name for worker in specification(config, files).roles] == ["inference_0", "trainer"]
    process = job.start("finish", "--resume")
    wait_until(lambda: is_running(job.output) or process.poll() is not None, "the job to go on")
    assert process.poll() is None, "the guest was forgotten"
    os.close(guest)
    output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, errors) == (0, "")
    assert "inference_0 ready" in output


def test_inference_is_started_only_while_there_is_something_to_generate(job: FakeJob, job_file: Path) -> None:
    config = load(JobConfig, job_file, ["--resume", "true"])
    job.output.mkdir()
    write_job(config, job_file.read_bytes())
    files = dict.fromkeys(("inference_0", "trainer", "orchestrator"), job_file)
    names = ["inference_0", "trainer", "orchestrator"]
    assert [worker.name for worker in specification(config, files).roles] == names
    publish_checkpoints(job, orchestrator=20, trainer=10)
    assert [worker.name for worker in specification(config, files).roles] == names[1:]
    assert not is_finished(config.orchestrator)


def test_a_directory_that_holds_something_else_is_left_alone(job: FakeJob) -> None:
    job.output.mkdir()
    (job.output / "thesis.tex").write_text("do not touch")
    for arguments in ([], ["--fresh"], ["--resume"]):
        code, _, errors = job.run("finish", *arguments)
        assert code == 2
        assert "holds something, but no job" in errors
    assert [path.name for path in job.output.iterdir()] == ["thesis.tex"]


def test_what_a_stopped_job_is_said_to_go_on_with_can_be_typed() -> None:
    for words in (["--resume", "true"], ["--resume=true"], ["--fresh", "--resume", "false"], []):
        assert resuming_command(["a b.toml", *words, "--seed", "3"]) == "counterpoint run 'a b.toml' --seed 3 --resume"
    assert resuming_command(["--trainer.compile", "true", "job.toml"]).endswith(
        "--trainer.compile true job.toml --resume"
    )


@pytest.mark.parametrize("steps", [0, 3])
def test_a_job_that_its_configuration_ended_goes_on_if_a_step_was_done(job: FakeJob, steps: int) -> None:
    """If none was, --fresh is named as well: --resume would refuse another model."""
    config = load(JobConfig, Path(job.arguments[0]), [])
    if steps:
        run = config.orchestrator
        write_checkpoint(run.run_dir, StepCheckpoint(steps, identity_of(run), {}, {}, []), keep=1)
    command = resuming_command(job.arguments)
    said = _how_to_go_on(config, Outcome(2, "trainer ended with exit code 2"), command)
    assert "--resume" in said
    assert ("--fresh" in said) == (not steps)
    assert _how_to_go_on(config, Outcome(1, "it was killed"), command).endswith("--resume")


def test_ctrl_c_stops_the_job_and_leaves_it_resumable(job: FakeJob) -> None:
    process = job.start("hang")
    job.wait_for_steps()
    assert is_running(job.output)
    (served,) = json.loads((job.output / "prometheus" / "supervisor.json").read_text())
    shown = families(int(served["targets"][0].rpartition(":")[2]))
    assert (shown["counterpoint_job_state"], shown["counterpoint_job_workers"]) == (1, 2)
    code, _, errors = FakeJob.run(job, "finish", "--resume")
    assert code == 75, "it may be free at the next attempt"
    assert f"a job runs in it: process {process.pid} on " in errors
    for again in ([], ["--fresh"]):
        code, _, errors = FakeJob.run(job, "finish", *again)
        assert (code, f"process {process.pid} on " in errors, "--fresh moves" in errors) == (75, True, False)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130
    assert f"It goes on with: counterpoint run {shlex.join(job.arguments)} --resume" in output
    assert not is_running(job.output)
    assert job.run("finish", "--resume")[0] == 0


@pytest.mark.parametrize(
    ("seen_by", "number", "expected"), [("pipe", signal.SIGINT, 130), ("terminal", signal.SIGHUP, 129)]
)
def test_a_job_whose_output_nobody_reads_any_more_still_ends_in_order(
    job: FakeJob, seen_by: str, number: signal.Signals, expected: int
) -> None:
    """Ctrl-C in `counterpoint run ... | tee log` ends `tee`, too; a lost connection takes the terminal away."""
    reader, writer = os.pipe() if seen_by == "pipe" else os.openpty()
    process = job.start("hang", output=writer)
    os.close(writer)
    job.wait_for_steps(reader)
    os.close(reader)
    process.send_signal(number)
    assert process.wait(DEADLINE_SECONDS) == expected
    assert json.loads((job.output / "summary.json").read_text())["steps"]["shipped"] >= 1
    workers = json.loads((job.output / "processes.json").read_text())["workers"]
    assert {worker["state"] for worker in workers} == {"stopped"}


def test_a_hangup_reads_the_jobs_file_again(job: FakeJob, job_file: Path) -> None:
    process = job.start("hang")
    job.wait_for_steps()
    table = tomllib.loads(job_file.read_text())
    table.setdefault("orchestrator", {})["steps"] = 33
    table.setdefault("trainer", {})["max_tokens"] = 9999
    job_file.write_text(tomli_w.dumps(table))
    process.send_signal(signal.SIGHUP)
    assert process.stdout is not None
    deadline = threading.Timer(DEADLINE_SECONDS, process.kill)
    deadline.start()
    said = next((line for line in process.stdout if "SIGHUP" in line), "")
    deadline.cancel()
    deadline.join()
    assert "not applied: run test: steps: it holds from the next start" in said
    assert "not applied: trainer.max_tokens: it holds from the next start" in said
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130


def replaced_by_directory(path: Path) -> bool:
    """Whether a directory could take a file's place, which is written again at any moment."""
    path.unlink()
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def test_a_disk_that_takes_no_status_file_ends_nothing(job: FakeJob) -> None:
    """A directory in the file's place stands for a full disk: what cannot be written."""
    process = job.start("hang")
    job.wait_for_steps()
    processes, summary = job.output / "processes.json", job.output / "summary.json"
    wait_until(lambda: replaced_by_directory(processes), "a moment in which the job does not write it")
    summary.mkdir()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130, errors
    assert "processes.json cannot be written: " in output
    assert "summary.json cannot be written: " in output
    assert "reward" in output, "the summary is shown all the same"
    processes.rmdir()
    summary.rmdir()
    assert job.run("finish", "--resume")[0] == 0


def test_a_job_that_is_killed_by_a_second_signal_says_so_in_whole_sentences(job: FakeJob) -> None:
    process = job.start("stubborn")
    job.wait_for_steps(count=3)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()

    def killed() -> bool:
        nonlocal sent
        if time.monotonic() - sent > REPETITION_SECONDS:
            process.send_signal(signal.SIGINT)
            sent = time.monotonic()
        return '"failed"' in (job.output / "processes.json").read_text()

    wait_until(killed, "a killed worker")
    output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, errors) == (130, ""), "they were killed as asked, and there is nothing to explain"
    assert "Counterpoint: interrupted by Ctrl-C, twice: everything was killed" in output


def test_the_summary_tells_how_many_steps_there_were_to_be(job: FakeJob) -> None:
    process = job.start("hang", "--orchestrator.steps", "14")
    job.wait_for_steps(count=3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert "3 trained, 3 sent to the trainer, of 14" in output
    assert json.loads((job.output / "summary.json").read_text())["steps"] == {
        "shipped": 3,
        "trained": 3,
        "wanted": 14,
        "counted_from": 1,
    }


def test_systemd_is_told_that_a_job_lives_is_ready_and_how_far_it_is(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    process = job.start("hang")
    said: list[tuple[str, str]] = []

    def hear_until(words: tuple[str, str]) -> None:
        while words not in said:
            assert select.select([listener], [], [], DEADLINE_SECONDS)[0]
            said.extend((listener.receive() or {}).items())

    for words in (("WATCHDOG", "1"), ("READY", "1"), ("STATUS", "running: test step 3/20")):
        hear_until(words)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_SECONDS) == 143
    publish_checkpoints(job, orchestrator=20, trainer=20)
    (job.output / "run_test" / "metrics.jsonl").write_text(json.dumps(shipped_line(20, 1.0)) + "\n")
    said.clear()
    assert job.run("fail", "--resume")[0] == 0
    hear_until(("READY", "1"))
    listener.close()


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ([], 1000),
        (["--keep-going"], 0),
        (["--keep_going=true"], 0),
        (["--keep-going=true"], 0),
        (["--keep-going=false"], 1000),
    ],
)
def test_keep_going_never_ends_a_run_that_learns_nothing(
    job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], groups: int
) -> None:
    monkeypatch.setattr(counterpoint.cli.run, "check_job", lambda config: None)
    assert counterpoint.cli.run.main([str(job_file), "--dry-run", *words]) == 0
    assert f"give_up_after = {groups}\n" in capsys.readouterr().out
