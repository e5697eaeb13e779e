"""A copy happens exactly once, whichever instant the asker or the trainer is killed at."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import pytest
import torch

from counterpoint.job.population.exploit import outcome, request_copy, wait
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.files.atomic import STABLE
from counterpoint.transport.messages import Ready
from tests.support.polling import DEADLINE_SECONDS, until
from tests.trainer.conftest import make_batch
from tests.trainer.one_process_trainer import (
    STEPS,
    Death,
    Deaths,
    Life,
    broadcast,
    life,
    saved_state,
    write_population,
)
from tests.trainer.orchestrator_end import (
    ended,
    feeder,
    log_path,
    metrics_lines,
    send_signal,
    trainer_process,
)

pytestmark = pytest.mark.slow

BEFORE = {"winner": 2, "loser": 3, "third": 2}
AFTER = {"winner": 2, "loser": STEPS, "third": 2}
COPIED = 4
"""The receiver's step that is the copy."""


def ask_and_copy(one: Life) -> None:
    """All that a kill may interrupt."""
    job = one.config.output_dir
    request_copy(job, "loser", "winner", 2, request_id="exploit")
    journal = job / "trainer" / "loser" / "copies" / f"step_{COPIED}" / STABLE
    one.turn_until(lambda: journal.exists() or outcome(job, "loser", "exploit") is not None, "the journal")
    one.wire.committed["loser"] = COPIED
    one.until_step(loser=COPIED)
    one.turn()


def train_to_the_end(one: Life) -> None:
    one.wire.committed |= AFTER
    one.until_step(**AFTER)
    one.turn()


def check_one_copy(job: Path) -> None:
    """One sequence of steps, one of which is the copy; of the others nothing has changed."""
    lines = [line for line in metrics_lines(job) if line["run_id"] == "loser"]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "copied/run" in line] == [COPIED]
    answer = wait(job, "loser", "exploit", 0)
    assert (answer.step, answer.source_step) == (COPIED, 2)
    copied, source = broadcast(job, "loser", COPIED), broadcast(job, "winner", 2)
    assert all(torch.equal(copied[name], source[name]) for name in source)
    assert not list((job / "run_loser" / "control" / "requests").glob("*.json"))
    assert not [path for path in job.rglob(".*.partial") if "copies" in path.parts]


@pytest.mark.parametrize("part", range(3))
def test_a_kill_at_any_file_operation_leaves_no_copy_or_a_whole_one(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    prepared = tmp_path / "prepared"
    write_population(prepared, dense_directory, checkpoint_interval=2)
    with life(prepared, dense_directory, dict(BEFORE)) as one:
        one.until_step(**BEFORE)
    whole = tmp_path / "whole"
    shutil.copytree(prepared, whole)
    deaths = Deaths()
    with life(whole, dense_directory, dict(BEFORE)) as one:
        one.until_step(**BEFORE)
        with monkeypatch.context() as patched:
            deaths.install(patched)
            ask_and_copy(one)
        train_to_the_end(one)
    check_one_copy(whole)
    expected = {run_id: saved_state(whole, run_id, step) for run_id, step in AFTER.items()}
    operations = len(deaths.seen)
    assert operations > 20, "the request, the journal, the broadcast, the checkpoint, the answer"
    for due in range(part, operations, 3):
        job = tmp_path / f"killed-{due}"
        shutil.copytree(prepared, job)
        deaths = Deaths()
        with life(job, dense_directory, dict(BEFORE)) as one:
            one.until_step(**BEFORE)
            with monkeypatch.context() as patched:
                deaths.install(patched)
                deaths.due = due
                with pytest.raises(Death):
                    ask_and_copy(one)
        with life(job, dense_directory, dict(BEFORE)) as again:
            ask_and_copy(again)
            train_to_the_end(again)
        check_one_copy(job)
        for run_id, step in AFTER.items():
            found = saved_state(job, run_id, step)
            same = {name: torch.equal(found[name], tensor) for name, tensor in expected[run_id].items()}
            assert all(same.values()), (due, deaths.seen[due], run_id)
        shutil.rmtree(job)


@pytest.mark.parametrize("instant", ["accepted", "published", "sealed"])
async def test_a_trainer_that_is_killed_goes_on_with_the_same_copy(
    dense_directory: Path, tmp_path: Path, instant: str
) -> None:
    write_population(tmp_path, dense_directory, checkpoint_interval=2)
    shutil.rmtree(tmp_path / "run_third")
    config = TrainerConfig.model_validate(
        {"output_dir": tmp_path, "model": str(dense_directory), "threads": 1, "max_runs": 2, "max_tokens": 64}
        | {"keep_broadcasts": 9, "stay": True}
    )
    marks = {
        "accepted": tmp_path / "trainer" / "loser" / "copies" / f"step_{COPIED}" / STABLE,
        "published": tmp_path / "run_loser" / "broadcast" / f"step_{COPIED}" / STABLE,
        "sealed": tmp_path / "trainer" / "loser" / "checkpoints" / f"step_{COPIED}" / STABLE,
    }
    with trainer_process(config) as process:
        async with feeder(config, "winner") as winner, feeder(config, "loser") as loser:
            await winner.until(Ready, next_step=1)
            await loser.until(Ready, next_step=1)
            await winner.train(*(make_batch(step, run_id="winner") for step in (1, 2)))
            await loser.train(*(make_batch(step, run_id="loser") for step in (1, 2, 3)))
            await until((tmp_path / "trainer/winner/checkpoints/step_2/STABLE").exists, "the source", DEADLINE_SECONDS)
            await until((tmp_path / "run_loser/broadcast/step_3/STABLE").exists, "step 3", DEADLINE_SECONDS)
            await asyncio.to_thread(request_copy, tmp_path, "loser", "winner", 2, request_id="exploit")
            await until(marks["accepted"].exists, "the journal", DEADLINE_SECONDS)
            if instant != "accepted":
                await loser.send(make_batch(COPIED, run_id="loser"))
                await until(marks[instant].exists, instant, DEADLINE_SECONDS)
            send_signal(process, signal.SIGKILL)
        assert await ended(process) == -signal.SIGKILL
    with trainer_process(config.model_copy(update={"resume": True})) as process:
        async with feeder(config, "loser") as loser:
            await loser.until(Ready)
            assert loser.ready is not None
            for step in range(loser.ready.next_step, STEPS + 1):
                await loser.train(make_batch(step, run_id="loser"))
            await until(lambda: outcome(tmp_path, "loser", "exploit") is not None, "the answer", DEADLINE_SECONDS)
            path = tmp_path / "trainer" / "loser" / "checkpoints" / f"step_{STEPS}" / STABLE
            await until(path.exists, "the last checkpoint", DEADLINE_SECONDS)
        send_signal(process, signal.SIGTERM)
        assert await ended(process) == 128 + signal.SIGTERM, log_path(config).read_text()
    check_one_copy(tmp_path)
