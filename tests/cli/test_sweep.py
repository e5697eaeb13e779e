"""`counterpoint sweep` as real processes around runs that pretend: killed, stopped and paused workers, and what is refused."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from counterpoint.cli.display.sweep_table import show_live
from counterpoint.cli.main import main
from counterpoint.cli.sweep import main as sweep
from counterpoint.cli.sweep import print_status
from counterpoint.job.claim_directory import NothingLeft
from counterpoint.job.configuration.load import load
from counterpoint.job.join import check_goes_on
from counterpoint.job.sweep.rows import TargetRow
from counterpoint.job.sweep.targets import SweepConfig, Target, targets_of
from counterpoint.sweep.lock import step_lock
from counterpoint.sweep.open_store import open_store
from counterpoint.sweep.status import TargetStatus
from counterpoint.sweep.store import StoreError
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.process.stop_requests import REPETITION_SECONDS
from tests.cli.fleet import ALL_STEPS, Fleet
from tests.support.polling import wait_until


@pytest.mark.slow
def test_workers_share_the_targets_and_the_same_name_runs_nothing_twice(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.settings["grid"]["seed"] = [1, 2, 3, 4]
    workers = [fleet.worker("finish"), fleet.worker("finish")]
    for worker in workers:
        code, output = fleet.finish(worker)
        assert code == 0, output
        assert "every target of test reads SUCCESS" in output
    for seed in range(1, 5):
        assert fleet.steps(f"seed-{seed}") == ALL_STEPS
        assert (fleet.status(f"seed-{seed}").state, fleet.status(f"seed-{seed}").token) == ("SUCCESS", 1)

    code, output = fleet.finish(fleet.worker("fail", "--worker"))
    assert (code, "attempt" in output) == (0, False)
    assert main(["sweep", "status", str(fleet.file)]) == 0
    shown = capsys.readouterr().out
    for part in ("4 targets, 4 SUCCESS", "seed-3", "20/?", "0.900"):
        assert part in shown
    assert main(["sweep", "status", str(fleet.file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["target_id"], row["values"], row["runs"][0]["step"]) for row in told] == [
        (f"seed-{seed}", {"seed": seed}, 20) for seed in range(1, 5)
    ]
    assert main(["sweep", "status", f"{fleet.root}/test"]) == 0
    assert "seed-4" in capsys.readouterr().out

    fleet.settings["name"] = "another"
    code, output = fleet.finish(fleet.worker("finish", "--max_attempts", "1"))
    assert code == 0, output
    assert "4 targets, 4 SUCCESS" in output, "without --worker, the table comes at the end"
    assert fleet.steps("seed-1") == ALL_STEPS


@pytest.mark.slow
def test_a_peer_goes_on_where_a_killed_worker_was(fleet: Fleet) -> None:
    fleet.settings["lease_seconds"] = 6.0
    first = fleet.worker("hang")
    fleet.wait_for_step_3("seed-1")
    first.kill()
    wait_until(lambda: not fleet.is_at_work("seed-1"), "the run to die with its worker")
    code, output = fleet.finish(fleet.worker("finish"))
    assert code == 0, output
    assert fleet.steps("seed-1") == fleet.steps("seed-2") == ALL_STEPS
    status = fleet.status("seed-1")
    assert (status.state, status.token, status.attempts) == ("SUCCESS", 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_drains_the_run_and_gives_it_back(fleet: Fleet, number: signal.Signals, expected: int) -> None:
    worker = fleet.worker("hang")
    fleet.wait_for_step_3("seed-1")
    worker.send_signal(number)
    code, output = fleet.finish(worker)
    assert code == expected, output
    assert not fleet.is_at_work("seed-1")
    status = fleet.status("seed-1")
    assert (status.state, status.attempts, status.error) == ("INTERRUPTED", 0, None)
    code, output = fleet.finish(fleet.worker("finish"))
    assert code == 0, output
    assert fleet.steps("seed-1") == ALL_STEPS


@pytest.mark.slow
def test_a_second_signal_kills_a_run_that_does_not_drain(fleet: Fleet) -> None:
    worker = fleet.worker("stubborn")
    fleet.wait_for_step_3("seed-1")

    for words in ("giving back what is claimed", "ending at once"):
        sent = -math.inf

        def has_said(words: str) -> bool:
            """Sends no signal that the worker would take for a repetition, and none once it has said the words."""
            nonlocal sent
            if words in fleet.outputs[worker].read_text():
                return True
            if time.monotonic() - sent > 2 * REPETITION_SECONDS:
                worker.send_signal(signal.SIGTERM)
                sent = time.monotonic()
            return False

        wait_until(lambda: has_said(words), words)  # noqa: B023 - awaited in the loop
    assert fleet.finish(worker)[0] == 143
    assert not fleet.is_at_work("seed-1")
    assert fleet.status("seed-1").state == "INTERRUPTED"


@pytest.mark.slow
def test_a_failed_target_has_its_process_output_quoted_and_stops_no_other(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.settings["max_attempts"] = 1
    code, output = fleet.finish(fleet.worker("finish,seed-1=fail"))
    assert code == 3
    assert "1 of 2 targets failed: seed-1" in output
    error = fleet.status("seed-1").error
    assert error is not None
    assert "ended with exit code 3" in error
    assert error.endswith("the disk is full")
    assert fleet.steps("seed-2") == ALL_STEPS
    main(["sweep", "status", str(fleet.file)])
    shown = capsys.readouterr().out
    assert "1 SUCCESS, 1 FAILED" in shown
    assert "the disk is full" in shown
    code, output = fleet.finish(fleet.worker("finish"))
    assert code == 3, "it has had its attempts"
    fleet.settings["max_attempts"] = 2
    code, output = fleet.finish(fleet.worker("finish"))
    assert code == 0, output
    assert fleet.steps("seed-1") == ALL_STEPS


@pytest.mark.slow
def test_a_target_that_fails_without_being_tried_is_told_with_its_reason(fleet: Fleet) -> None:
    store = open_store(f"{fleet.root}/test")
    for target_id in ("seed-1", "seed-2"):
        store.write(target_id, b"no record", None)
    code, output = fleet.finish(fleet.worker("finish"))
    assert code == 3, output
    for target_id in ("seed-1", "seed-2"):
        assert f"{fleet.root}/test: {target_id} is not a sweep's record" in output
    assert "move it away" in output


@pytest.mark.slow
def test_a_worker_that_was_paused_past_its_lease_ends_its_run_before_a_peer_goes_on(fleet: Fleet) -> None:
    fleet.settings["lease_seconds"] = 6.0
    paused = fleet.worker("finish,seed-1=hang")  # whoever is first at the other target ends it
    fleet.wait_for_step_3("seed-1")
    paused.send_signal(signal.SIGSTOP)
    peer = fleet.worker("finish")
    wait_until(lambda: fleet.status("seed-1").token == 2, "the peer to take it")
    assert fleet.is_at_work("seed-1"), "the run of the paused worker does not know yet"
    assert fleet.steps("seed-1") == [1, 2, 3]
    paused.send_signal(signal.SIGCONT)
    for worker in (peer, paused):
        code, output = fleet.finish(worker)
        assert code == 0, output
    assert fleet.steps("seed-1") == fleet.steps("seed-2") == ALL_STEPS
    assert (fleet.status("seed-1").state, fleet.status("seed-1").token) == ("SUCCESS", 2)


@pytest.mark.slow
def test_a_target_waits_for_the_job_that_it_is_to_join(fleet: Fleet) -> None:
    worker = fleet.worker("finish,seed-1=wait")
    fleet.wait_for_step_3("seed-1")
    os.close(fleet.lock)
    fleet.let_go("seed-1")
    waiting = f"seed-2: waiting for the job in {fleet.output}, which does not run"
    wait_until(lambda: waiting in fleet.outputs[worker].read_text(), "the worker to say so")
    fleet.lock = take_lock(fleet.output / "job.lock", "")
    code, output = fleet.finish(worker)
    assert code == 0, output
    assert fleet.status("seed-2").token == 1


@pytest.mark.slow
def test_a_lost_lease_ends_even_a_run_that_does_not_listen(fleet: Fleet) -> None:
    fleet.settings["lease_seconds"] = 6.0
    worker = fleet.worker("finish,seed-1=stubborn")
    fleet.wait_for_step_3("seed-1")
    away = fleet.root.with_name("away")
    fleet.root.rename(away)
    fleet.root.write_text("no directory: every heartbeat fails")
    wait_until(lambda: not fleet.is_at_work("seed-1"), "the run to be killed")
    fleet.root.unlink()
    away.rename(fleet.root)
    code, output = fleet.finish(worker)
    assert code == 0, output
    assert "did not end in time and is killed" in output
    assert fleet.steps("seed-1") == ALL_STEPS, "the worker came back to it"


def test_a_dry_run_refuses_what_a_target_names_and_is_not_there(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], job_file: Path
) -> None:
    fleet.settings["base"]["training"] = {"lora": {"rank": 4, "start_from": "/gone"}}
    assert main(["sweep", fleet.write(), "--dry-run"]) == 2
    assert "target seed-1: training.lora.start_from = '/gone': there is no adapter" in capsys.readouterr().err
    fleet.settings |= {"file": str(job_file), "base": {}, "grid": {"model": ["tiny-moe", "./gone"]}}
    del fleet.settings["join"]
    assert main(["sweep", fleet.write(), "--dry-run"]) == 2
    assert "model = './gone': there is no such directory" in capsys.readouterr().err
    assert not fleet.root.exists()


def test_a_dry_run_lists_the_targets_as_comments_of_a_file_that_loads(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", fleet.write(), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "# 2 targets:\n#   seed-1: seed = 1\n#   seed-2: seed = 2\n" in shown
    again = fleet.file.with_name("again.toml")
    again.write_text(shown)
    assert load(SweepConfig, again, []) == load(SweepConfig, fleet.file, [])
    assert not fleet.root.exists()


def targets(fleet: Fleet) -> list[Target]:
    fleet.write()
    return targets_of(load(SweepConfig, fleet.file, []), fleet.file)


def test_a_run_has_the_jobs_wire_its_own_values_and_the_sweeps_name(fleet: Fleet) -> None:
    first, second = targets(fleet)
    (run,) = second.runs
    assert (run.run_id, run.seed, run.output_dir, run.model) == ("test.seed-2", 2, fleet.output, "some-model")
    assert run.inference.urls == ["http://127.0.0.1:8000"]
    assert first.command[-5:] == ["orchestrator", str(first.file), "--join", str(fleet.output), "--resume"]
    assert first.settings["seed"] == 1, "only its own values are in its file: the job may come back at another address"
    assert "model" not in first.settings


def test_without_a_job_to_join_each_target_is_one(fleet: Fleet, job_file: Path) -> None:
    del fleet.settings["join"]
    fleet.settings["file"] = str(job_file)
    fleet.settings["base"] = {"orchestrator": {"steps": 7}}
    fleet.settings["grid"] = {"orchestrator": {"training": {"learning_rate": [1e-3, 1e-4]}}}
    first, _ = targets(fleet)
    (run,) = first.runs
    assert (run.steps, run.training.learning_rate, run.resume) == (7, 1e-3, True)
    assert first.output_dir == fleet.output / "test" / "learning_rate-0.001"
    assert first.file == fleet.output / "test" / "learning_rate-0.001.toml"
    assert first.command[-3:] == ["run", str(first.file), "--resume"]
    fleet.settings["base"] |= {"stay": True}
    with pytest.raises(UserError, match="stay = true: "):
        _ = targets(fleet)[0].runs


def test_an_error_names_the_table_or_the_file_that_has_the_value(fleet: Fleet, job_file: Path) -> None:
    del fleet.settings["join"]
    fleet.settings["file"] = str(job_file)
    wrong = {"orchestrator": {"environments": {"0": {"ratio": [-2.0]}}}}
    for change, where in (
        ({"base": {"orchestrator": {"stpes": 7}}}, f"{fleet.file}, [base]: orchestrator.stpes = 7"),
        ({"grid": wrong}, f"{fleet.file}, target ratio--2.0: orchestrator.environments[0].ratio = -2.0"),
    ):
        fleet.settings |= {"base": {}, "grid": {"seed": [1]}} | change
        (target,) = targets(fleet)
        with pytest.raises(UserError) as caught:
            _ = target.runs
        assert where in str(caught.value)
    fleet.settings |= {"base": {}, "grid": {"seed": [1]}}
    job_file.write_text(job_file.read_text().replace("run_id", "rnu_id"))
    with pytest.raises(UserError, match=rf"{job_file}: orchestrator.rnu_id = 'test'"):
        _ = targets(fleet)[0].runs


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"grid": {"sed": [1]}}, ["sed = 1", "a run has no such key; the nearest is seed"]),
        (
            {"grid": {"training": {"sed": [1]}}, "base": {"training": {"learning_rate": 1.0}}},
            [" | sed = [", "nearest is training.lora.seed"],
        ),
        (
            {"grid": {}, "zip": [{"training": {"sed": [1]}}], "base": {"training": {"learning_rate": 1.0}}},
            [" | sed = ["],
        ),
        (
            {"grid": {"environments": {"0": {"knd": ["x"]}}}},
            ["environments.0.knd = x", "nearest is environments.0.kind"],
        ),
        ({"grid": {"environments": {"1": {"kind": ["x"]}}}}, ["environments.1.kind = 'x'", "1 entries"]),
        ({"grid": {"environments": {"0": {"kind": ["x"]}}}}, ["target kind-x", "environments[0]", "'x'"]),
        ({"grid": {"steps": [1, 0]}}, ["target steps-0: steps = 0", "greater than or equal to 1"]),
        ({"grid": {"run_id": ["a"]}}, ["run_id = a", "set by the sweep"]),
        ({"grid": {"training": {"lora": {"rank": [9]}}}}, ["target rank-9", "rank = 9 is above"]),
        ({"grid": {}}, ["there is no target"]),
        ({"root": "memory://here"}, ["root = 'memory://here'", "name a directory"]),
        ({"root": "ftp://there"}, ["root = 'ftp://there'", "none is known for ftp"]),
        ({"lease_seconds": 1.5}, ["lease_seconds = 1.5 is below twice heartbeat_seconds"]),
        ({"name": "a/b"}, ["name = 'a/b'"]),
        ({"name": "x" * 25}, ["name = 'xxx"]),
        ({"join": "nowhere"}, ["there is no job (job.json is missing)"]),
        ({"file": "nowhere.toml"}, ["nowhere.toml: there is no such file"]),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_claimed(
    fleet: Fleet, change: dict[str, Any], expected: list[str]
) -> None:
    fleet.settings |= change
    with pytest.raises(UserError) as caught:
        sweep([fleet.write(), "--worker"])
    for part in expected:
        assert part in str(caught.value)
    assert not fleet.root.exists()


def test_a_root_with_brackets_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "[" / "red]"
    with step_lock(root / "a"):
        pass
    assert print_status([str(root)]) == 0
    assert "[/red]: 1 targets, 1 SUCCESS" in capsys.readouterr().out


async def test_the_live_table_outlives_what_cannot_be_read_for_a_moment() -> None:
    looks = iter([PermissionError("run_a/metrics.jsonl"), StoreError("s3://b: no answer")])

    def look() -> list[TargetRow]:
        if error := next(looks, None):
            raise error
        return [TargetRow(TargetStatus("a", "SUCCESS"), None, {})]

    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("counterpoint.cli.display.sweep_table.REFRESH_SECONDS", 0.0)
        await show_live(look, "rates", Console(file=shown, force_terminal=True, width=140), until_settled=True)
    assert "rates: run_a/metrics.jsonl" in shown.getvalue()
    assert "1 SUCCESS" in shown.getvalue()


def test_a_place_without_a_sweep_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no target was ever claimed there"):
        print_status([str(tmp_path)])
    assert print_status([]) == 2


def test_a_target_whose_run_was_evicted_keeps_no_other_from_its_work(fleet: Fleet) -> None:
    """Its own worker finds that it does not go on."""
    file = Path(fleet.write())
    evicted = fleet.output / "run_test.seed-1" / "control" / "evicted.txt"
    evicted.parent.mkdir(parents=True)
    evicted.write_text("the loss is not finite")
    first, second = (target.runs[0] for target in targets_of(load(SweepConfig, file, []), file))
    assert [first.run_id, second.run_id] == ["test.seed-1", "test.seed-2"]
    with pytest.raises(NothingLeft, match="evicted: the loss is not finite"):
        check_goes_on(first)
    check_goes_on(second)
