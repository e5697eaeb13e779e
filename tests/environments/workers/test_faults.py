"""What an environment in workers can do wrong, through real processes: it costs its own worker's rollouts, with the reason."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from counterpoint.environments.workers import pool, supply, watcher
from counterpoint.orchestrator.rollouts.failures import kind_of
from tests.environments.workers.playing import Playing, playing, wait_until

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]


async def bystander(each: Playing) -> None:
    """A rollout beside a fault is as ever, whichever worker plays it."""
    rollout = await each.play("well")
    assert rollout.error is None
    assert rollout.reward == 2.0


async def test_what_one_rollout_does_wrong_costs_no_other(tmp_path: Path, model: Path) -> None:
    expected = {
        "raise": "KeyError: 'the environment is broken'",
        "text": "NoReward: score returned '0.7' (str); expected a number (in score, ",
        "state": "ValueError: the environment left a state that is not JSON-serialisable",
        "nan": "NoReward: score returned nan (float); expected a finite number (in score, ",
        "unscored": "ZeroDivisionError: no score",
        "call": "ValueError: a prompt must be a flat, non-empty sequence of token ids",
        "exit": "SystemExit: 3",
        "interrupt": "KeyboardInterrupt",
        "hang": "missed its deadline of rollout_timeout_seconds = 0.5",
    }
    async with playing(tmp_path, model) as each:
        before = each.pids()
        for fault, error in expected.items():
            seconds = 0.5 if fault == "hang" else 60.0
            rollout, _ = await asyncio.gather(each.play(fault, seconds), bystander(each))
            assert rollout.error is not None
            assert rollout.error.startswith(error), fault
            assert rollout.reward is None
        await wait_until(lambda: each.environment.take_metrics()["environment/mine/sessions"] == 0)
        assert each.pids() == before, "no worker was lost"
    assert not list((tmp_path / "environments" / "mine").glob("*.sock"))


async def test_a_flood_of_output_and_a_process_left_behind_harm_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with playing(tmp_path, model, workers=1) as each:
        for fault in ("flood", "orphan", "well"):
            assert (await each.play(fault)).error is None
        log = tmp_path / "environments" / "mine" / "worker-0.log"
        await wait_until(lambda: log.with_name("worker-0.log.1").exists() and log.stat().st_size < 2**24)
        assert log.with_name("worker-0.log.1").stat().st_size <= 2**20
        guardian = each.pool.workers[0].process.guardian
    assert not os.path.exists(f"/proc/{guardian}")  # noqa: ASYNC240


async def test_a_worker_that_dies_takes_only_its_own_rollouts_with_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "MOST_MESSAGES", 300)
    monkeypatch.setattr(watcher, "BLOCKED_SECONDS", 60.0)  # on a busy machine, too, the fault goes to the free worker
    expected = {
        "leave": "died: exit code 3; last output: 'I leave'",
        "kill": "died: signal 9 (SIGKILL); last output: ",
        "crash": "died: signal 11 (SIGSEGV); last output: 'Fatal Python error: Segmentation fault",
        "fork": "processes; worker_processes = 10",
        "leak": "MiB of memory; worker_memory_bytes allows 400 MiB",
        "socket": "was killed: it sent what no worker sends; more than",
        "forge": "was killed: it sent what no worker sends; a message about a session that it does not have",
    }
    async with playing(tmp_path, model, worker_processes=10, worker_memory_bytes=400 * 2**20) as each:
        for fault, error in expected.items():
            await wait_until(lambda: all(worker.ready for worker in each.pool.workers))
            beside = asyncio.create_task(each.play("hang", 120.0))  # at one worker, and the fault at the other
            await wait_until(lambda: sum(len(worker.sessions) for worker in each.pool.workers) == 1)
            rollout = await each.play(fault)
            assert rollout.error is not None
            assert error in rollout.error, fault
            assert "its worker N" in kind_of(rollout.error)
            assert f"environment 'mine': {rollout.error}" in caplog.text
            assert rollout.reward is None
            assert not beside.done(), f"{fault} at one worker failed a rollout at the other"
            beside.cancel()
            await asyncio.wait([beside])
            await bystander(each)
        assert each.environment.take_metrics()["environment/mine/restarts"] == len(expected)


@pytest.mark.parametrize("fault", ["block", "hold"])
async def test_a_blocked_loop_is_named_and_killed_once_a_deadline_has_passed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    monkeypatch.setattr(watcher, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(watcher, "SILENT_SECONDS", 1.25)
    async with playing(tmp_path, model, workers=1) as each:
        blocked = asyncio.create_task(each.play(fault, 2.0))  # time enough to begin on a busy machine
        await wait_until(lambda: each.servers.asked)
        with_it = await each.play("hang")
        assert (await blocked).error == "missed its deadline of rollout_timeout_seconds = 2"
        assert with_it.error is not None
        place = (
            f"its worker 0 was killed: its event loop was blocked in _{fault}, {REPOSITORY}/tests/environments/workers/"
        )
        assert with_it.error.startswith(f"{place}faulty.py:")
        assert kind_of(with_it.error).startswith("its worker N was killed: its event loop was blocked in")
        assert f"environment 'mine': the event loop of its worker 0 is blocked in _{fault}, " in caplog.text
        assert each.environment.take_metrics()["environment/mine/lag/max"] >= 1.0
        await bystander(each)


async def test_a_rollout_that_ignores_its_cancellation_ends_with_its_worker(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watcher, "GRACE_SECONDS", 0.5)
    async with playing(tmp_path, model, workers=1) as each:
        before = each.pids()
        assert "missed its deadline" in str((await each.play("stubborn", 2.0)).error)
        await wait_until(lambda: each.pids() and each.pids() != before and each.pool.workers[0].ready)
        await bystander(each)
    assert "has a rollout that ignores its cancellation" in caplog.text


async def test_workers_that_cannot_start_end_the_start_with_the_reason(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ValueError, match=r"environment 'mine': args = .*KeyError: 'no such dataset'"):
        async with playing(tmp_path, model, args={"at_load": "raise"}):
            pass
    with pytest.raises(ValueError, match=r"environment 'mine': kind = .* ended with 5"):
        async with playing(tmp_path, model, args={"at_load": "leave"}):
            pass


async def test_workers_that_no_longer_start_fail_the_rollouts_with_the_reason(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with playing(tmp_path, model) as each:
        monkeypatch.setenv("CLUSTER_TEST_LEAVE", "1")  # from now on they die while they load
        monkeypatch.setattr(supply, "PAUSE_SECONDS", (0.05, 0.05))
        for worker in each.pool.workers:
            worker.kill("was killed: by a test")
        await wait_until(lambda: each.pool._supply.failure)
        rollout = await each.play("well")
        assert rollout.error is not None
        assert rollout.error.startswith(
            "environment 'mine': its workers do not start: died: exit code 7; last output: 'no dataset"
        )
        assert rollout.error.partition(";")[0] in caplog.text
        monkeypatch.delenv("CLUSTER_TEST_LEAVE")
        await wait_until(lambda: any(worker.ready for worker in each.pool.workers))
        await bystander(each)


async def test_workers_that_do_not_leave_are_killed_at_the_end(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "LEAVE_SECONDS", 0.2)
    async with playing(tmp_path, model, workers=1) as each:
        blocked = asyncio.create_task(each.play("block"))
        # Silence shows that it has its answer: asked to leave before that, it would.
        await wait_until(lambda: each.servers.asked and each.pool.workers[0].silent_ticks >= 4)
        guardian = each.pool.workers[0].process.guardian
    assert "its worker 0 died: signal 9" in str((await blocked).error)
    assert not os.path.exists(f"/proc/{guardian}")  # noqa: ASYNC240
