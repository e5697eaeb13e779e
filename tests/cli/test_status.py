"""`counterpoint status`: as tables, for programs, and repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from counterpoint.cli.main import main
from counterpoint.cli.status import main as status
from counterpoint.job.directory import JOB_LOCK
from counterpoint.job.reading.summary import summarize
from counterpoint.run.loop_health.slow_spots import METRIC
from counterpoint.trainer.telemetry.mismatch import MismatchWatch
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.files.json_lines import append_line
from counterpoint.transport.files.lock import take_lock
from tests.support.jobs import EARLY_WARNING, shipped_line, write_lines
from tests.support.past_jobs import history_of, make_job, write_discarded
from tests.support.polling import DEADLINE_SECONDS


def shown_by_status(output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert status([str(output)]) == 0
    return capsys.readouterr().out


def test_status_shows_the_run_its_processes_and_the_last_error(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(past)
    (past / "trainer" / "trainer.log").write_text("fine\n12:00 ERROR   out of memory\nmore\n")
    write_discarded(past, step=20)
    shown = shown_by_status(past, capsys)
    for part in ("20/20", "1.000", "was ready", "no", "last error of trainer: 12:00 ERROR   out of memory"):
        assert part in shown
    assert "run test: 512 rollouts discarded since step 20 (500 failed, 12 filtered): no rollout of 4 survived" in shown


def test_status_shows_a_jump_of_the_mismatch(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(past)
    watch = MismatchWatch(past)
    watch.begin("test", 19, [3e-6] * 4)
    watch.take("test", 20, 0.14, [("7-1[/red]", 2.0)])
    shown = " ".join(shown_by_status(past, capsys).split())
    assert "mismatch KL of step 20 is 0.14, after 3e-06 in the steps before" in shown
    assert "7-1[/red] (2)" in shown


def test_status_shows_early_warnings(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(past)
    append_line(
        past / "run_test" / "metrics.jsonl", shipped_line(21, 21.0, early_warnings=[EARLY_WARNING, {"sign": "no"}])
    )
    shown = " ".join(shown_by_status(past, capsys).split())
    assert "run test: cut since step 12: math: 95% of the answers are cut at their limit" in shown
    assert "What to do: raise sampling.max_tokens" in shown
    assert status([str(past), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["early_warnings"] == [EARLY_WARNING]


def test_status_shows_brackets_as_they_are(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(past, status="at [fe80::1]:8000 [/red]", restarts=1, last_death="died [/of] it")
    shown = shown_by_status(past, capsys)
    assert "at [fe80::1]:8000 [/red]" in shown
    assert "1, it died [/of] it" in shown


def test_status_shows_what_could_steer_a_terminal_as_text(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(past, status="\x1b[2J", trouble="\x9b2J")
    place = {"function": "f[int]\x1b[2J", "file": "x.py", "line": 1, "inside": ""}
    blame = {"kind": "callback", **place, "callback": "", "thread": "", "seconds": 1.0, "worst": 1.0, "count": 1}
    write_lines(past / "run_guest" / "metrics.jsonl", [shipped_line(1, 200.0) | {METRIC: [blame]}])
    (past / "run_guest" / "orchestrator.log").write_text("ERROR \x1b]0;title\x07\n")
    (past / "run_guest" / "control").mkdir()
    (past / "run_guest" / "control" / "evicted.txt").write_text("\x1b[1A[/red] gone")
    shown = shown_by_status(past, capsys)
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    for told in (r"\x9b2J; \x1b[2J", r"ERROR \x1b]0;title\x07", r"evicted: \x1b[1A[/red] gone", r"f[int]\x1b[2J"):
        assert told in shown


def test_status_says_why_a_worker_could_not_start_and_not_its_last_line_of_errors(
    past: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (past / "trainer" / "trainer.log").write_text("ERROR of the log\n")
    words = "ended with exit code 2: no such model"
    make_job(past, state="failed", pid=None, log_from=0, last_death=words)
    shown = shown_by_status(past, capsys)
    assert f"trainer failed: it {words}" in shown
    assert "last error" not in shown
    make_job(past, state="failed", pid=None, log_from=0, last_death="ended with exit code 1")
    shown = shown_by_status(past, capsys)
    assert "trainer failed: it ended with exit code 1" in shown
    assert "last error of trainer: ERROR of the log" in shown


@pytest.mark.parametrize(("state", "waits"), [("starting", True), ("ready", False)])
def test_status_waits_for_a_server_that_starts_for_the_first_time(
    past: Path, capsys: pytest.CaptureFixture[str], state: str, waits: bool
) -> None:
    make_job(past, name="inference_0", state=state, pid=None)
    outage = {
        "kind": "server",
        "who": "inference server x",
        "what": "is not ready yet",
        "since": 0,
        "reason": "refused",
    }
    content = {"format": 1, "run": "test", "time": time.time(), "step": 0, "outages": [outage], "servers": []}
    (past / "run_test" / "fleet.json").write_text(json.dumps(content))
    lock = take_lock(past / JOB_LOCK, "it is running")
    try:
        shown = shown_by_status(past, capsys)
    finally:
        os.close(lock)
    assert ("waiting for inference server x since" in shown) is waits
    assert ("refused" in shown) is not waits


def test_status_names_the_newest_weights_that_can_be_loaded(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "weights" not in shown_by_status(past, capsys)
    for step, file in ((0, "model"), (8, "model"), (9, "delta")):
        with publish_directory(past / "run_test" / "broadcast" / f"step_{step}", durable=False) as directory:
            (directory / f"{file}.safetensors").touch()
    newest = past / "run_test" / "broadcast" / "step_8"
    assert f"run test weights: {newest}" in shown_by_status(past, capsys)
    summary = summarize(history_of(past), past, 1.0, "done")
    assert summary["weights"] == str(newest)


def test_status_shows_errors_of_the_newest_session_only(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    former, present, farewell = b"ERROR of old\n", b"fine\nERROR of now\n", b"ERROR at the end\n"
    (past / "trainer" / "trainer.log").write_bytes(former + present + farewell)
    until = len(former) + len(present)
    make_job(past, state="stopped", log_from=len(former), log_until=until)
    assert "last error of trainer: ERROR of now" in shown_by_status(past, capsys)
    make_job(past, state="failed", log_from=len(former), log_until=until)
    assert "last error of trainer: ERROR at the end" in shown_by_status(past, capsys)
    make_job(past, state="stopped", log_from=until, log_until=until)
    assert "last error" not in shown_by_status(past, capsys)
    make_job(past, state="stopped", log_from=None)
    assert "last error" not in shown_by_status(past, capsys)


def test_status_of_a_job_whose_command_was_killed(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its agent stops the servers, which nobody notes; what vLLM says of that is no cause."""
    log = "12:00 ERROR   a cause\n(EngineCore pid=7) INFO [shutdown] EngineCore: trigger received signal=SIGTERM\nERROR dead\n"
    (past / "trainer" / "trainer.log").write_text(log)
    make_job(past, state="ready", log_from=0)
    shown = shown_by_status(past, capsys)
    assert "its command was killed. Start it again with --resume" in shown
    assert "last error of trainer: 12:00 ERROR   a cause" in shown
    make_job(past, state="stopped", log_from=0)
    assert "killed" not in shown_by_status(past, capsys)


def test_status_shows_the_error_of_a_server_that_was_started_again(
    past: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What came before the signal that ended its first process is no more of interest than what came after it."""
    stopped = "(EngineCore pid=7) INFO [shutdown] EngineCore: trigger received signal=SIGTERM\nERROR dead\n"
    (past / "trainer" / "trainer.log").write_text(f"ERROR first\n{stopped}ERROR out of memory\n")
    make_job(past, state="ready", log_from=0)
    lock = take_lock(past / JOB_LOCK, "it is running")
    try:
        assert "last error of trainer: ERROR out of memory" in shown_by_status(past, capsys)
    finally:
        os.close(lock)
    (past / "trainer" / "trainer.log").write_text(f"{stopped}ERROR out of memory\n{stopped}")
    assert "last error of trainer: ERROR out of memory" in shown_by_status(past, capsys)


def test_status_of_roles_that_were_started_one_by_one(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by_status(past, capsys)
    assert "20/?" in shown
    (past / "run_test" / "control").mkdir()
    (past / "run_test" / "control" / "orch.toml").write_text("steps = 30\n")
    shown = shown_by_status(past, capsys)
    assert "20/30" in shown
    assert "No processes are known" in shown
    for damaged in (b"steps = ", b"steps = 'many'\n", b"\xff"):
        (past / "run_test" / "control" / "orch.toml").write_bytes(damaged)
        assert "20/?" in shown_by_status(past, capsys), "which is for its trainer to refuse"


def test_status_of_a_directory_that_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds neither a job"):
        status([str(tmp_path)])


def test_status_of_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        status([str(tmp_path / "nowhere")])


def test_status_shows_others_runs_evictions_and_restarts(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(past, restarts=2, last_death="was killed by SIGKILL")
    write_lines(past / "run_visitor" / "metrics.jsonl", [shipped_line(1, 200.0)])
    (past / "run_visitor" / "orchestrator.log").write_text("12:00 ERROR   no more disk\n")
    (past / "run_visitor" / "control").mkdir()
    (past / "run_visitor" / "control" / "evicted.txt").write_text("it diverged\n")
    shown = shown_by_status(past, capsys)
    for part in (
        "visitor",
        "evicted",
        "run visitor evicted: it diverged",
        "not running",
        "2, it was killed by SIGKILL",
    ):
        assert part in shown
    assert "last error of run visitor: 12:00 ERROR   no more disk" in shown
    descriptor = take_lock(past / "run_test" / "orchestrator.lock", "taken")
    assert "running" in shown_by_status(past, capsys).replace("not running", "")
    os.close(descriptor)


def test_a_run_whose_orchestrator_waits_for_the_servers_is_starting(
    past: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def state() -> str:
        assert status([str(past), "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["runs"][0]["state"])

    make_job(past, name="orchestrator", state="waiting", pid=None)
    (past / "trainer" / "metrics.jsonl").unlink()
    assert state() == "not running", "nobody runs the job"
    descriptor = take_lock(past / JOB_LOCK, "taken")
    assert state() == "starting"
    make_job(past, name="orchestrator", state="failed", pid=None)
    assert state() == "not running"
    os.close(descriptor)


def test_status_for_programs_has_what_the_tables_have(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(past)
    assert status([str(past), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runs"]
    assert (run["run_id"], run["state"], run["step"], run["steps"], run["trained"]) == (
        "test",
        "not running",
        20,
        20,
        19,
    )
    assert run["metrics"]["reward/mean"] == pytest.approx(1.0)
    assert run["tokens_per_second"] == pytest.approx(500)
    assert not found["running"]
    assert [(worker["name"], worker["alive"]) for worker in found["processes"]] == [("trainer", False)]


def test_a_worker_that_outlives_its_supervisor_is_alive_and_what_took_its_number_later_is_not(
    past: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def alive(since: float) -> bool:
        make_job(past, pid=os.getpid(), since=since)
        assert status([str(past), "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["processes"]
        return bool(found["alive"])

    assert alive(since=time.time())
    assert not alive(since=1e9)


def test_no_life_is_claimed_of_a_process_that_may_be_on_another_machine(
    past: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(past)
    job = json.loads((past / "job.json").read_text())
    (past / "job.json").write_text(json.dumps(job | {"backend": "ray"}))
    held = take_lock(past / JOB_LOCK, "taken")
    assert status([str(past), "--json"]) == 0
    assert [worker["alive"] for worker in json.loads(capsys.readouterr().out)["processes"]] == [None]
    os.close(held)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("processes.json", '{"processes": 3}', "job is missing"),
        ("processes.json", '{"job": "running", "workers": null}', "workers: expected a list, found None"),
        ("processes.json", '{"job": "running", "workers": [{}]}', "workers[0].name is missing"),
        ("job.json", '{"orchestrator": null}', "expected the job's run as orchestrator"),
        (
            "job.json",
            '{"orchestrator": {"run_id": "test", "steps": []}}',
            "orchestrator.steps: expected a valid integer",
        ),
        ("job.json", '{"runs": 3}', "runs: expected a list, found 3"),
    ],
)
def test_status_names_a_damaged_file(
    past: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, said: str, held: bool
) -> None:
    make_job(past)
    (past / name).write_text(content)
    lock = take_lock(past / JOB_LOCK, "taken") if held else None
    for flags in ([], ["--json"]):
        assert main(["status", str(past), *flags]) == 2
        assert f"counterpoint: error: {past / name} is damaged: {said}" in capsys.readouterr().err
    if lock is not None:
        os.close(lock)


@pytest.mark.slow
def test_watching_looks_again_and_ctrl_c_ends_it(past: Path) -> None:
    code = (
        "import signal, sys, counterpoint.cli.status; counterpoint.cli.status.WATCH_SECONDS = 0.05\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(counterpoint.cli.status.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, str(past), "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        looks = [json.loads(watch.stdout.readline())["runs"][0]["step"]]
        with (past / "run_test" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(shipped_line(21, 150.0)) + "\n")
        while looks[-1] != 21:
            looks.append(json.loads(watch.stdout.readline())["runs"][0]["step"])
        watch.send_signal(signal.SIGINT)
        assert watch.wait(DEADLINE_SECONDS) == 0
    assert looks[0] == 20


def test_status_of_fine_tuning_goes_by_the_trained_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run_sft" / "control").mkdir(parents=True)
    (tmp_path / "run_sft" / "sft.json").write_text("{}")
    (tmp_path / "run_sft" / "control" / "orch.toml").write_text("steps = 2\n")
    lock = take_lock(tmp_path / JOB_LOCK, "")
    for step, state in ((1, "running"), (1, "unfinished"), (2, "done")):
        write_lines(tmp_path / "trainer" / "metrics.jsonl", [{"run_id": "sft", "step": step, "time": 1.0}])
        if state == "unfinished":
            os.close(lock)
        assert state in shown_by_status(tmp_path, capsys)
