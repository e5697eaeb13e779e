"""A job of several runs around workers that pretend: each run's end is its own; runs come as guests, are stopped, and evicted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from counterpoint.cli.orchestrator import main as orchestrator
from counterpoint.cli.status import main as status
from counterpoint.cli.stop import main as stop
from counterpoint.job.claim_directory import NothingLeft
from counterpoint.job.directory import control_directory, is_running, orchestrator_of
from counterpoint.models import write_tokenizer
from counterpoint.transport.errors import UserError
from tests.support.keepers import end_keepers
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.ports import free_port

pytestmark = pytest.mark.slow


class Sweep:
    """`counterpoint run` with three pretending runs, and guests that pretend, too."""

    def __init__(self, tmp_path: Path) -> None:
        self.output = tmp_path / "out"
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").touch()
        write_tokenizer(model, longest=1024)
        port = free_port()
        self.file = tmp_path / "sweep.toml"
        self.settings: dict[str, Any] = {
            "output_dir": str(self.output),
            "model": str(model),
            "inference": {"port": port, "max_model_len": 256},
            "trainer": {"max_tokens": 1024},
            "orchestrator": {
                "steps": 20,
                "sampling": {"max_tokens": 32},
                "training": {"lora": {"rank": 4}},
                "environments": [{"name": "reverse", "kind": "reverse-text"}],
            },
            "runs": [{"run_id": name} for name in ("a", "b", "c")],
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self, behaviour: str, *arguments: str) -> subprocess.Popen[str]:
        self.file.write_text(tomli_w.dumps(self.settings))
        return self._start("fake_job", behaviour, str(self.file), *arguments)

    def guest(self, run_id: str, behaviour: str) -> subprocess.Popen[str]:
        guest = self._start("fake_orchestrator", str(self.output), run_id, behaviour)
        wait_until(lambda: orchestrator_of(self.output, run_id) is not None, f"guest {run_id}")
        return guest

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"tests.cli.{program}", *arguments]
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        self.started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, text=True, **pipes))  # type: ignore[call-overload]
        return self.started[-1]

    def steps(self, run_id: str) -> int:
        metrics = self.output / f"run_{run_id}" / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for(self, run_id: str, steps: int) -> None:
        wait_until(lambda: self.steps(run_id) >= steps, f"step {steps} of run {run_id}")

    def states(self) -> dict[str, str]:
        workers = json.loads((self.output / "processes.json").read_text())["workers"]
        return {worker["name"]: worker["state"] for worker in workers}


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, output, errors


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    sweep = Sweep(tmp_path)
    yield sweep
    for process in sweep.started:
        process.kill()
        process.communicate()
    end_keepers(control_directory(sweep.output))


def test_runs_end_each_in_its_own_way_and_the_summary_says_which(sweep: Sweep) -> None:
    code, output, errors = finish(sweep.start("finish,picture,b=fail,c=die"))
    assert code == 3, output + errors
    for part in ("a  step 20/20", "b  step 3/20", "c  step 20/20", "orchestrator_c was killed by SIGKILL: restarting"):
        assert part in output
    assert "orchestrator_b ended with exit code 3. The end of" in errors
    assert "| the disk is full" in errors
    summary = json.loads((sweep.output / "summary.json").read_text())
    assert {name: run["steps"] for name, run in summary["runs"].items()} == {
        "a": {"shipped": 20, "trained": 20, "wanted": 20, "counted_from": 1},
        "b": {"shipped": 3, "trained": 3, "wanted": 20, "counted_from": 1},
        "c": {"shipped": 20, "trained": 20, "wanted": 20, "counted_from": 1},
    }
    assert summary["runs"]["b"]["outcome"] == "failed: ended with exit code 3"
    assert "it goes on with: counterpoint run" in output
    assert (sweep.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (sweep.output / "roles").iterdir()) == [
        "inference_0.toml", "orchestrator_a.toml", "orchestrator_b.toml", "orchestrator_c.toml", "trainer.toml"
    ]  # fmt: skip


def test_one_run_is_stopped_and_another_evicted_while_the_third_goes_on(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    job = sweep.start("hang")
    for name in ("a", "b", "c"):
        sweep.wait_for(name, 3)
    assert stop(["a", "--job", str(sweep.output)]) == 0
    said = capsys.readouterr().out
    assert "run a has stopped after" in said
    assert "step 3/?" in said
    wait_until(lambda: sweep.states()["orchestrator_a"] == "stopped", "the supervisor to notice")
    assert sweep.states()["orchestrator_b"] == sweep.states()["orchestrator_c"] == "ready"
    assert stop(["a", "--job", str(sweep.output)]) == 0
    assert "run a does not run; step 3/?" in capsys.readouterr().out

    assert stop(["b", "--job", str(sweep.output), "--evict", "it diverged [/now]"]) == 0
    assert "run b was evicted after" in capsys.readouterr().out
    wait_until(lambda: sweep.states()["orchestrator_b"] == "failed", "the supervisor to notice")
    assert sweep.states()["orchestrator_c"] == "ready"
    assert status([str(sweep.output)]) == 0
    shown = capsys.readouterr().out
    for part in ("not running", "running", "evicted", "run b evicted: it diverged [/now]"):
        assert part in shown
    job.send_signal(signal.SIGINT)
    code, output, errors = finish(job)
    assert (code, errors) == (130, ""), "nobody need read a log to learn why a run was evicted"
    assert "orchestrator_b ended with exit code 3" in output
    assert "run b: evicted: it diverged [/now]" in output
    file = sweep.output / "run_b" / "control" / "evicted.txt"
    before_resuming = (
        f"run 'b' was evicted: it diverged [/now]; before it is resumed, remove the cause, and then {file}"
    )
    assert before_resuming in output.replace("\n", " ")
    assert re.search(r"\ba +stopped after step 3 +3/20 ", output)
    outcomes = {
        name: run["outcome"] for name, run in json.loads((sweep.output / "summary.json").read_text())["runs"].items()
    }
    assert outcomes == {"a": "stopped after step 3", "b": "evicted: it diverged [/now]", "c": "stopped after step 3"}


def test_a_run_that_is_about_to_come_back_is_stopped_all_the_same(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    job = sweep.start("hang,c=return")
    wait_until((sweep.output / "processes.json").exists, "the job to start")
    wait_until(lambda: sweep.states()["orchestrator_c"] == "restarting", "the death of c")
    assert stop(["c", "--job", str(sweep.output)]) == 0
    assert "run c has stopped after" in capsys.readouterr().out
    wait_until(lambda: sweep.states()["orchestrator_c"] == "stopped", "the supervisor to notice")
    job.send_signal(signal.SIGTERM)
    assert finish(job)[0] == 143


def test_what_is_to_be_removed_before_evicted_runs_go_on_and_that_a_run_was_done(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.settings["runs"] = [{"run_id": "a"}]
    job = sweep.start("hang", "--resume")
    sweep.wait_for("a", 3)
    assert stop(["a", "--job", str(sweep.output), "--evict", "it diverged"]) == 0
    code, output, _ = finish(job)
    assert code == 3
    assert f"no job in {sweep.output} yet; it begins at step 0" in output.replace("\n", " ")
    assert "Once that is removed, it goes on with: counterpoint run" in output
    evicted = sweep.output / "run_a" / "control" / "evicted.txt"
    evicted.unlink()
    assert finish(sweep.start("finish", "--resume"))[0] == 0
    (sweep.output / "run_a" / "control" / "orch.toml").write_text("steps = 20")
    capsys.readouterr()
    assert stop(["a", "--job", str(sweep.output), "--evict", "too late"]) == 0
    assert "run a was done; step 20/20. It is evicted now" in capsys.readouterr().out
    assert evicted.exists()


def test_a_run_that_is_not_there_or_no_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "run_known").mkdir()
    for name in ("unknown", "../known", "known/../known"):
        with pytest.raises(UserError, match="its runs are known"):
            stop([name, "--job", str(tmp_path)])
    with pytest.raises(UserError, match="--job names the job's directory"):
        stop(["known", "--job", str(tmp_path / "elsewhere")])
    with pytest.raises(UserError, match="expected one argument"):
        stop(["known", "--job"])


def test_a_job_waits_for_its_guests(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    job = sweep.start("hang")
    for name in ("a", "b", "c"):
        sweep.wait_for(name, 3)
    guest = sweep.guest("visitor", "hang")
    wait_until((sweep.output / "run_visitor" / "control").exists, "its directory")
    (sweep.output / "run_visitor" / "control" / "orch.toml").write_bytes(b"\xff")
    (sweep.output / "run_visitor" / "discarded.json").write_bytes(b"\0")
    for name in ("a", "b", "c"):
        assert stop([name, "--job", str(sweep.output)]) == 0
    wait_until(lambda: sweep.states()["orchestrator_c"] == "stopped", "the supervisor to notice")
    assert sweep.states()["inference_0"] == "ready"
    assert status([str(sweep.output)]) == 0
    assert "running, guest" in capsys.readouterr().out
    assert stop(["visitor", "--job", str(sweep.output)]) == 0
    assert guest.wait(DEADLINE_SECONDS) == 143
    code, output, errors = finish(job)
    assert (code, errors) == (143, ""), output + errors
    assert "It goes on with: counterpoint run" in output
    assert "visitor  step 3/?" in output
    assert (
        json.loads((sweep.output / "summary.json").read_text())["runs"]["visitor"]["outcome"] == "stopped after step 3"
    )


def test_a_job_that_stays_waits_for_guests_without_a_run_of_its_own(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    del sweep.settings["runs"], sweep.settings["orchestrator"]["environments"]
    sweep.settings["stay"] = True
    job = sweep.start("finish")
    wait_until((sweep.output / "processes.json").exists, "the job to start")
    wait_until(lambda: sweep.states()["inference_0"] == "ready", "the servers")
    assert sweep.guest("brief", "finish").wait(DEADLINE_SECONDS) == 0
    for guest in ("default", "visitor"):
        assert sweep.guest(guest, "hang").poll() is None
        sweep.wait_for(guest, 3)
    assert status([str(sweep.output)]) == 0
    shown = capsys.readouterr().out
    assert "running, guest" in shown
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    code, output, errors = finish(job)
    assert (code, errors) == (143, ""), output + errors
    assert "visitor  step 3/?" in output
    again = sweep.start("finish", "--resume")
    wait_until(lambda: is_running(sweep.output), "the job to go on")
    wait_until(lambda: sweep.states()["inference_0"] == "ready", "the servers once more")
    again.send_signal(signal.SIGTERM)
    assert finish(again)[0] == 143


def test_a_resumed_job_may_gain_runs_and_leave_some_out(sweep: Sweep) -> None:
    assert finish(sweep.start("finish"))[0] == 0
    sweep.settings["runs"] = [{"run_id": "c"}, {"run_id": "d"}]
    code, output, _ = finish(sweep.start("finish", "--resume"))
    assert code == 0
    assert "d  step 20/20" in output
    assert sweep.steps("a") == 20
    sweep.settings["runs"] = [{"run_id": "x"}]
    code, _, errors = finish(sweep.start("finish", "--resume"))
    assert code == 2
    assert "began with run_id = 'c', 'd', and now it is 'x'" in errors


def test_a_directory_with_a_living_guest_is_not_moved_aside(sweep: Sweep) -> None:
    assert finish(sweep.start("finish"))[0] == 0
    guest = sweep.guest("visitor", "hang")
    code, _, errors = finish(sweep.start("finish", "--fresh"))
    assert code == 75
    assert "run 'visitor' still runs in it" in errors
    assert guest.poll() is None


GUEST = """
run_id = "visitor"

[[environments]]
name = "guess"
kind = "guess-number"

[sampling]
max_tokens = 32

[training]
lora = { rank = 4 }
"""


def test_a_run_that_joins_has_the_jobs_model_wire_and_servers(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "guest.toml"
    file.write_text(GUEST)
    join = [str(file), "--join", str(sweep.output), "--dry-run"]
    with pytest.raises(UserError, match=r"there is no job \(job.json is missing\)"):
        orchestrator(join)
    sweep.output.mkdir()
    (sweep.output / "job.json").write_text('{"inference": {}, "trainer": {}}')
    with pytest.raises(UserError, match="lacks orchestrator: did another version"):
        orchestrator(join)
    (sweep.output / "job.json").unlink()
    job = sweep.start("hang")
    sweep.wait_for("a", 3)
    assert orchestrator(join) == 0
    shown = capsys.readouterr().out
    evicted = sweep.output / "run_visitor" / "control" / "evicted.txt"
    evicted.parent.mkdir(parents=True)
    evicted.write_text("it diverged")
    with pytest.raises(NothingLeft, match="run 'visitor' was evicted: it diverged"):
        orchestrator([*join, "--resume"])
    evicted.unlink()
    for part in (
        f'output_dir = "{sweep.output}"',
        f'model = "{sweep.settings["model"]}"',
        f'"http://127.0.0.1:{sweep.settings["inference"]["port"]}"',
    ):
        assert part in shown
    for change, said in (
        (["--run_id", "b"], "one of the job's own runs (a, b, c)"),
        (["--training.lora.rank", "32"], "training.lora.rank = 32 is above inference.lora.max_rank = 4"),
        (["--training.lora", "null"], "training.lora is not set: runs that share a trainer"),
        (["--sampling.max_tokens", "999"], "sampling.max_tokens = 999 leaves no room"),
        (["--output_dir", str(tmp_path)], "is not the directory of the job to join"),
    ):
        with pytest.raises(UserError) as caught:
            orchestrator([*join, *change])
        assert said in str(caught.value)
    job.send_signal(signal.SIGTERM)
    assert finish(job)[0] == 143
    with pytest.raises(UserError, match="no job runs in"):
        orchestrator(join)
