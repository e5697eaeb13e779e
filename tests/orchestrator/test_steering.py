"""Steering a run: pauses over kills, changes that are seen, a dump that was asked for, a profile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from counterpoint.environments.mix import mix_of
from counterpoint.environments.workers.load import load_environment
from counterpoint.job.admin.ask import NotAnswered, Refused
from counterpoint.job.admin.change import change_run, changeable_values
from counterpoint.job.admin.inspect import inspect_run
from counterpoint.job.admin.run_requests import dump_next_step, pause_run, profile_loop, resume_run
from counterpoint.orchestrator.changes import Changes
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.decisions import DECISIONS_FILE
from counterpoint.orchestrator.rollouts.dump import open_dump
from counterpoint.orchestrator.steering import Steering
from counterpoint.orchestrator.step.asked_dumps import AskedDumps
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.profile import Profile
from counterpoint.run.loop_health.watchdog import Watchdog
from counterpoint.run.pause import read_pause
from counterpoint.run.requests import (
    AnyRequest,
    ChangeRequest,
    DumpRequest,
    PauseRequest,
    ProfileRequest,
    ResumeRequest,
    other_use,
    read_answer,
    write_request,
)
from counterpoint.trainer.runs.control_files import evict
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.records import Batch
from tests.orchestrator.daemons import assert_whole, metrics_of, records_of, started
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.polling import wait_until

FILTERS = [{"kind": "zero_advantage", "mode": "monitor"}, {"kind": "gibberish", "mode": "monitor"}]


def decisions_of(config: RunConfig) -> list[str]:
    """In order; without a line that is being written, or that a kill has torn."""
    path, decisions = config.run_dir / DECISIONS_FILE, list[str]()
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(orjson.JSONDecodeError):
            decisions.append(orjson.loads(line)["decision"])
    return decisions


def since_resume(number: int, decisions: list[str]) -> list[str]:
    """What was decided since a resume, counted from 1; nothing before it."""
    begins = [position for position, decision in enumerate(decisions) if decision == "resumed"]
    return decisions[begins[number - 1] :] if len(begins) >= number else []


def assert_order_of_examples(config: RunConfig) -> None:
    """Group n has the n-th example, as in a run without pauses."""
    played = {each.name: load_environment(each) for each in config.environments}
    mix = mix_of(config.environments, played, config.seed)
    found = {int(record["rollout_id"].partition("-")[0]): record["example_index"] for record in records_of(config)}
    expected = [mix.next()[1] for _ in range(max(found) + 1)]
    assert found == {group: expected[group] for group in found}


@contextmanager
def beside(config: RunConfig, work: Callable[[], None]) -> Iterator[None]:
    """Does the work in a thread beside the daemon. If it fails, evicts the run, so that the daemon ends, and raises why."""
    failures: list[BaseException] = []

    def do() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
            evict(config.output_dir, "one", "the test has failed")

    thread = threading.Thread(target=do)
    thread.start()
    try:
        yield
    finally:
        thread.join(120)
        if failures:
            raise failures[0]
    assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", ["write_pause", "write_answer"])
def test_a_pause_holds_whatever_is_killed(make_config: Callable[..., RunConfig], killed_at: str) -> None:
    """Between request and answer, and then in the pause itself; nothing starts meanwhile, and nothing is lost."""
    config = make_config(steps=8)
    fault = f"import os, counterpoint.orchestrator.steering as s; s.{killed_at} = lambda *a: os._exit(9); "
    released = threading.Event()

    def hold(batch: Batch) -> None:
        assert batch.step < 3 or released.wait(60)

    with ScriptedTrainer(config.output_dir, "one", 8, answer=hold) as trainer:
        with started(config, fault) as process:
            trainer.wait_for_step(2)
            write_request(config.run_dir, PauseRequest(request_id="pause", reason="a new cable"))
            wait_until(lambda: process.poll() is not None, "the kill")
        assert (read_pause(config.run_dir) is not None) == (killed_at == "write_answer")
        released.set()
        resumed = config.model_copy(update={"resume": True})
        with started(resumed) as process:
            wait_until(lambda: read_answer(config.run_dir, "pause") is not None, "the answer")
            wait_until(lambda: "paused" in since_resume(1, decisions_of(config)), "the pause after the first kill")
        pause = read_pause(config.run_dir)
        assert pause is not None
        assert pause.reason == "a new cable"
        committed = published_steps(config.run_dir / "rollouts")

        def go_on() -> None:
            wait_until(lambda: "paused" in since_resume(2, decisions_of(config)), "the pause after the second kill")
            resume_run(config.output_dir, "one", ResumeRequest())

        with beside(config, go_on):
            assert run(resumed, lambda: None) == 0
    assert read_pause(config.run_dir) is None
    assert len(committed) < 8
    assert_whole(config, 8)
    decisions = since_resume(2, decisions_of(config))
    assert decisions.count("continued") == 1
    assert "started" not in decisions[: decisions.index("continued")]
    assert_order_of_examples(config)


@pytest.mark.slow
def test_a_run_is_steered_while_it_runs(make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(steps=10)
    released, progress = threading.Event(), list[int]()
    watched = Watchdog.progress

    def count(self: Watchdog) -> None:
        progress.append(1)
        watched(self)

    monkeypatch.setattr(Watchdog, "progress", count)
    seen: dict[str, Any] = {}

    def hold(batch: Batch) -> None:
        assert batch.step < 3 or released.wait(60)

    def steer() -> None:
        job = config.output_dir
        trainer.wait_for_step(2)
        with pytest.raises(Refused, match=r"schedule\.group_size cannot change"):
            change_run(job, "one", ChangeRequest(changes={"schedule.group_size": 2}))
        with pytest.raises(Refused, match="max_inflight_rollouts = 3 cannot hold one group"):
            change_run(job, "one", ChangeRequest(changes={"schedule.max_inflight_rollouts": 3}))
        changes = {"schedule.max_inflight_rollouts": 40, "filters": FILTERS, "log_level": "debug"}
        seen["changed"] = change_run(job, "one", ChangeRequest(changes=changes))
        seen["paused"] = pause_run(job, "one", PauseRequest(reason="to look at it"))
        assert pause_run(job, "one", PauseRequest(reason="again")).paused
        profiled = profile_loop(job, "one", ProfileRequest(seconds=0.3))
        seen["profile"] = profiled, orjson.loads(profiled.speedscope.read_bytes()), profiled.collapsed.read_text()
        released.set()
        write_request(config.run_dir, DumpRequest(request_id="dump"))
        wait_until((config.run_dir / "control" / "dumps.json").exists, "the dump's step")
        enough = len(progress) + 2
        wait_until(lambda: len(progress) >= enough, "a pause that is no stall")
        seen["entry"] = inspect_run(job, "one")
        seen["values"] = changeable_values(job, "one")
        with pytest.raises(NotAnswered, match="taken back"):
            dump_next_step(job, "one", DumpRequest(), 0.0)
        resume_run(job, "one", ResumeRequest())
        seen["dumped"] = dump_next_step(job, "one", DumpRequest(request_id="dump"), 60)

    with ScriptedTrainer(config.output_dir, "one", 10, answer=hold) as trainer, beside(config, steer):
        assert run(config, lambda: None) == 0
    assert_whole(config, 10)
    changed, dumped = seen["changed"], seen["dumped"]
    lines = {line["step"]: line for line in metrics_of(config)}
    assert [step for step in lines if "changes" in lines[step]] == [changed.step]
    assert lines[changed.step]["changes"] == changed.changes
    assert sum(line.get("phase/paused", 0.0) for line in lines.values()) > 0
    assert seen["entry"]["state"] == "paused"
    assert seen["entry"]["paused"]["reason"] == "to look at it"
    assert [entry["step"] for entry in seen["entry"]["changes"]] == [changed.step]
    assert seen["values"]["schedule.max_inflight_rollouts"] == 40
    assert seen["values"]["sampling.temperature"] == 1.0
    dumps = published_steps(config.run_dir / "raw_rollouts")
    assert dumped.step in dumps
    assert len(dumps) <= 2, "that of the request that was taken back may be there, too"
    dump = open_dump(dumped.directory)
    assert [each.kind for each in dump.header.filters] == ["zero_advantage", "gibberish"]
    assert {each.rollout_id for each in dump.rollouts()} == {
        record["rollout_id"] for record in records_of(config, f"step_{dumped.step}")
    }
    _, speedscope, collapsed = seen["profile"]
    (profile,) = speedscope["profiles"]
    assert profile["endValue"] == pytest.approx(sum(profile["weights"]))
    assert profile["endValue"] >= 0.3
    assert "(waiting) " in collapsed
    assert not list((config.run_dir / "control" / "requests").glob("*.json"))
    assert "DEBUG" in (config.run_dir / "orchestrator.log").read_text()


class CommittedSteps:
    durable_step = 0
    newest_step = 3


def steering_of(run_dir: Path) -> Steering:
    (run_dir / "control").mkdir()
    steps = CommittedSteps()
    return Steering(
        run_dir,
        changes=cast(Changes, None),
        dumps=AskedDumps(run_dir, 3, steps, asyncio.Lock()),
        steps=steps,
        set_paused=lambda pause: None,
        every_poll=lambda: None,
    )


async def test_an_answer_says_what_was_asked(tmp_path: Path) -> None:
    steering = steering_of(tmp_path)
    requests: list[AnyRequest] = [
        PauseRequest(request_id="1"),
        ResumeRequest(request_id="2"),
        DumpRequest(request_id="3"),
    ]
    for request in requests:
        write_request(tmp_path, request)
    await steering.take_all()
    for request in requests:
        answer = read_answer(tmp_path, request.request_id)
        assert answer is not None
        assert answer.kind == request.kind
        assert other_use(tmp_path, request) is None


async def test_a_profile_that_fails_is_refused_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(seconds: float) -> Profile:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("counterpoint.orchestrator.steering.profile_loop", fail)
    steering = steering_of(tmp_path)
    write_request(tmp_path, ProfileRequest(request_id="flames"))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        await steering.take_all(tasks)
    answer = read_answer(tmp_path, "flames")
    assert answer is not None
    assert answer.outcome == "refused"
    assert "can't start new thread" in answer.reason
