"""The executor for this machine: what every executor must do, and its own processes, deadlines and devices.

What a trial's process alone answers for, the same one on Ray, is tried here and not in `contract.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint import tune
from counterpoint.transport.process.launch import descendants
from counterpoint.tune.executors.attempt import Deadlines
from counterpoint.tune.executors.executor import Completed, Failed, Reported, Saved, SaveFailed, Started, Stopped
from counterpoint.tune.executors.forked_here import reason_against_a_fork
from counterpoint.tune.executors.local import LocalTrialExecutor
from counterpoint.tune.registry import path_of
from counterpoint.tune.resources import Resources
from tests.support.polling import wait_until
from tests.tune.executors.contract import *  # noqa: F403
from tests.tune.executors.driver import Driver, content, hidden, is_alive, parent_of

pytestmark = pytest.mark.slow


def open_crash_files() -> int:
    """How many files for crashes this process has not closed."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            found += "memfd:crash" in os.readlink(f"/proc/self/fd/{number}")
    return found


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[Driver]:
    executor = LocalTrialExecutor(cpus=2, gpus=["a", "b"])
    yield Driver(executor, tmp_path)
    await executor.close()
    assert not open_crash_files()
    assert str(executor.ledger).startswith("0/2 cpu")


async def test_a_function_goes_on_from_the_checkpoint_that_it_made(driver: Driver) -> None:
    trial = driver.trial("counts")
    await driver.begin(trial)
    asked = driver.checkpoint(trial, 1)
    assert (await driver.result(trial))["count"] == 1
    driver.executor.save_to(trial, asked)
    assert "has made no checkpoint yet" in (await driver.next(SaveFailed, trial)).error
    assert (await driver.result(trial))["count"] == 2
    made = (await driver.next(Saved, trial)).checkpoint
    assert made is not None
    assert [made.iteration, made.result["count"]] == [2, 2]
    assert (await driver.result(trial))["count"] == 3
    later = driver.checkpoint(trial, 3)
    driver.executor.save_to(trial, later)
    assert (await driver.next(Saved, trial)).checkpoint == replace(later, iteration=2)
    await driver.stop(trial)
    for checkpoint in (made, later):
        await driver.begin(trial, checkpoint)
        result = await driver.result(trial)
        assert [result["count"], result["training_iteration"]] == [3, 3]
        await driver.stop(trial)
    assert not hidden(trial.logdir)


async def test_a_trial_takes_another_config_and_checkpoint_in_place(driver: Driver) -> None:
    plain, trial = driver.trial("Counter"), driver.trial("Resettable")
    for each in (plain, trial):
        await driver.begin(each)
    assert not driver.executor.change(plain, {}, None)
    before = await driver.result(trial)
    for in_place in (True, False):
        assert driver.executor.change(trial, {"begin": 10, "in_place": in_place}, None)
        await driver.next(Started, trial)
        after = await driver.result(trial)
        assert [after["count"], after["training_iteration"], after["pid"]] == [11, 1, before["pid"]]
    await driver.result(plain)
    source = driver.checkpoint(plain, 1)
    driver.executor.save_to(plain, source)
    await driver.next(Saved, plain)
    assert driver.executor.change(trial, {"begin": 20}, source)
    await driver.next(Started, trial)
    exploited = await driver.result(trial)
    assert [exploited["count"], exploited["training_iteration"]] == [2, 2]
    assert exploited["config"] == {"begin": 20}
    for each in (plain, trial):
        await driver.stop(each)


async def test_a_failure_to_save_leaves_the_trial_as_it_was(driver: Driver) -> None:
    trial = driver.trial("CannotSave")
    await driver.begin(trial)
    await driver.result(trial)
    checkpoint = driver.checkpoint(trial, 1)
    driver.executor.save_to(trial, checkpoint)
    assert "made of cheese" in (await driver.next(SaveFailed, trial)).error
    assert not hidden(trial.logdir)
    assert content(checkpoint.path) is None
    assert (await driver.result(trial))["training_iteration"] == 2
    await driver.stop(trial)


async def test_a_checkpoint_that_is_none_fails_the_trial(driver: Driver) -> None:
    trial = driver.trial("Counter")
    driver.start(trial, driver.checkpoint(trial, 1))
    assert "is no checkpoint of a trainable" in (await driver.next(Failed, trial)).error


async def test_each_trial_sees_its_own_devices(driver: Driver) -> None:
    whole = driver.trial("Devices", "whole", Resources(cpu=0, gpu=1))
    shares = [driver.trial("Devices", f"share{index}", Resources(cpu=0, gpu=0.5)) for index in range(3)]
    none = driver.trial("Devices", "none", Resources(cpu=0))
    seen = []
    for trial in (whole, *shares[:2], none):
        await driver.begin(trial)
        seen.append((await driver.result(trial))["devices"])
    assert seen == ["a", "b", "b", ""]
    assert not driver.executor.has_resources(shares[2].resources)
    await driver.stop(whole)
    await driver.begin(shares[2])
    assert (await driver.result(shares[2]))["devices"] == "a"


async def test_a_failed_trial_that_hangs_while_it_is_stopped_is_killed(tmp_path: Path) -> None:
    executor = LocalTrialExecutor(cpus=1, deadlines=Deadlines(stop_seconds=3.0))  # the cleanup begins within it
    driver = Driver(executor, tmp_path)
    trial = driver.trial("Breaks", config={"hangs": True})
    try:
        await driver.begin(trial)
        await driver.result(trial)
        executor.proceed(trial)
        assert "no second step" in (await driver.next(Failed, trial)).error
    finally:
        await executor.close()
    assert content(trial.logdir, "cleaned") == "after 1\n"


async def test_a_process_is_used_anew(driver: Driver) -> None:
    executor = LocalTrialExecutor(cpus=1, reuse_actors=True)
    again = Driver(executor, Path(driver.trial("reports").logdir))
    try:
        pids = set()
        for trainable in ("reports", "Resettable"):
            for name in ("first", "second"):
                trial = again.trial(trainable, f"{trainable}-{name}", config={"times": 5})
                heard = await again.run([trial], lambda trial: 2)
                events = heard[trial.trial_id]
                assert [type(event) for event in events] == [Started, Reported, Reported, Stopped]
                results = [event.result for event in events if isinstance(event, Reported)]
                assert [result["training_iteration"] for result in results] == [1, 2]
                assert {result["trial_id"] for result in results} == {trial.trial_id}
                pids.add(results[0]["pid"])
        assert len(pids) == 2
    finally:
        await executor.close()
    assert not any(map(is_alive, pids))
    assert content(trial.logdir, "cleaned") == ""


async def test_what_hangs_is_killed_at_its_deadline(tmp_path: Path) -> None:
    executor = LocalTrialExecutor(cpus=3, deadlines=Deadlines(start_seconds=60, save_seconds=0.2, stop_seconds=0.2))
    driver = Driver(executor, tmp_path)
    try:
        in_step, in_save = driver.trial("hangs"), driver.trial("HangsInSave")
        for trial in (in_step, in_save):
            await driver.begin(trial)
        executor.proceed(in_step)
        executor.save_to(in_save, driver.checkpoint(in_save, 0))
        assert "did not save within 0.2 s" in (await driver.next(Failed, in_save)).error
        await driver.stop(in_step)
        executor._deadlines.start_seconds = 0.2
        in_setup = driver.trial("HangsInSetup")
        driver.start(in_setup)
        assert "did not start within 0.2 s" in (await driver.next(Failed, in_setup)).error
    finally:
        await executor.close()


STARTS_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
"""


@pytest.mark.parametrize(
    ("at_import", "error"),
    [
        (STARTS_A_THREAD, ""),
        ("import os; os._exit(9)", "ended with exit code 9"),
        ("raise ValueError('not here')", "not here"),
    ],
)
async def test_each_trial_imports_its_module(driver: Driver, tmp_path: Path, at_import: str, error: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from counterpoint import tune\n{at_import}\n\n\ndef it(config):\n    tune.report(one=1)\n")
    trial = driver.trial("reports")
    trial.trainable_name = f"{script}:it"
    heard = (await driver.run([trial]))[trial.trial_id]
    if error:
        assert isinstance(heard[0], Failed)
        assert error in heard[0].error
    else:
        assert [type(event) for event in heard] == [Started, Reported, Completed, Stopped]


DRAWS = """
import random
import numpy, torch
from counterpoint import tune

random.seed(1), numpy.random.seed(1), torch.manual_seed(1)

def it(config):
    tune.report(drawn=[random.random(), numpy.random.random(), torch.rand(1).item()])
"""


async def test_the_global_generators_are_seeded_anew_in_each_trial(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    trials = [driver.trial("reports", name) for name in ("one", "two")]
    for trial in trials:
        trial.trainable_name = f"{tmp_path / 'draws.py'}:it"
    heard = await driver.run(trials)
    drawn = [event.result["drawn"] for events in heard.values() for event in events if isinstance(event, Reported)]
    assert all(one != other for one, other in zip(*drawn, strict=True))


async def test_a_killed_trial_and_a_killed_guardian_fail_only_their_own(driver: Driver) -> None:
    killed, other = driver.trial("Counter", "killed"), driver.trial("Counter", "other")
    for trial in (killed, other):
        await driver.begin(trial)
    os.kill((await driver.result(killed))["pid"], 9)
    assert "killed by SIGKILL" in (await driver.next(Failed, killed)).error
    pid = (await driver.result(other))["pid"]
    await driver.begin(killed)
    os.kill(parent_of(pid), 9)
    assert "killed by SIGKILL" in (await driver.next(Failed, other)).error
    wait_until(lambda: not is_alive(pid), "the end of the trial without a guardian")
    assert (await driver.result(killed))["count"] == 1


async def test_a_closure_survives_another_and_fails_with_the_copy_that_forked_it(tmp_path: Path) -> None:
    def counts(config: dict[str, object]) -> None:
        while True:
            tune.report(pid=os.getpid())

    if reason_against_a_fork():
        pytest.skip(f"here is {reason_against_a_fork()}")
    before = set(descendants(os.getpid()))
    executor = LocalTrialExecutor(cpus=3)
    driver = Driver(executor, tmp_path)
    trials = [driver.trial("counts", name) for name in ("killed", "other", "again")]
    for trial in trials:
        trial.trainable_name = path_of(counts)
    killed, other, again = trials
    try:
        for trial in (killed, other):
            await driver.begin(trial)
        os.kill((await driver.result(killed))["pid"], 9)
        assert "killed by SIGKILL" in (await driver.next(Failed, killed)).error
        pid = (await driver.result(other))["pid"]
        os.kill(parent_of(parent_of(pid)), 9)
        assert "killed by SIGKILL" in (await driver.next(Failed, other)).error
        assert not is_alive(pid)
        await driver.begin(again)
        assert parent_of(parent_of(parent_of((await driver.result(again))["pid"]))) == os.getpid()
    finally:
        await executor.close()
    assert set(descendants(os.getpid())) <= before


PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.tune.executors.driver import Driver, content, is_alive, parent_of
from counterpoint.tune.executors.forked_here import reason_against_a_fork
from counterpoint.tune.executors.local import LocalTrialExecutor

async def main():
    driver = Driver(LocalTrialExecutor(cpus=2), Path(sys.argv[1]))
    child, plain = driver.trial("leaves_a_child"), driver.trial("Counter")
    for trial in (child, plain):
        await driver.begin(trial)
    result, other = await driver.result(child), await driver.result(plain)
    print(result["child"], result["pid"], other["pid"], flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_a_process_that_has_closed_its_socket_fails(driver: Driver) -> None:
    trial = driver.trial("closes_its_socket")
    await driver.begin(trial)
    driver.executor.proceed(trial)
    assert "ended with exit code 1" in (await driver.next(Failed, trial)).error


def test_everything_dies_with_the_executor(tmp_path: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) == 3
        below = descendants(program.pid)
        assert set(pids) <= set(below)
    finally:
        program.kill()
        program.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in below), "the end of all processes")


EXPERIMENT = """
import sys
from counterpoint import tune

def it(config):
    tune.report(value=config["value"])

{guard}
    trials = tune.run_experiments(
        {{"here": {{"run": it, "config": {{"value": 7}}, "local_dir": sys.argv[1]}}}}, raise_on_failed_trial=False, verbose=0
    )
    print(trials[0].status, trials[0].last_result.get("value"), trials[0].error_msg)
"""


def started(script: Path, text: str) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    command = [sys.executable, str(script), str(script.with_name("results"))]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_an_experiment_in_a_script_starts_no_other_in_its_trials(tmp_path: Path, guard: str) -> None:
    """Without a guard as Ray 1.x, where a function is pickled: trials are forked from the tuner."""
    ran = started(tmp_path / "experiment.py", EXPERIMENT.format(guard=guard))
    assert ran.stdout == "TERMINATED 7 None\n", ran.stderr


def test_a_script_without_a_guard_runs_all_that_it_has_registered(tmp_path: Path) -> None:
    text = """
import sys
from counterpoint import tune

class Made(tune.Trainable):
    def step(self):
        return {"value": tune.env_creator("cellar")(self.config), "done": True}

tune.register_env("cellar", lambda config: 3)
def creator(config):
    return 4 + config["value"]
tune.register_env("cellar", creator)
tune.register_trainable("made", Made)
def main():
    for each in ("made", Made):
        analysis = tune.run(each, config={"value": 1}, local_dir=sys.argv[1], verbose=0)
        print(analysis.trials[0].last_result["value"])
main()
"""
    ran = started(tmp_path / "registering.py", text)
    assert ran.stdout == "5\n5\n", ran.stdout + ran.stderr


def test_a_script_without_a_guard_is_told_of_it_where_it_cannot_be_forked(tmp_path: Path) -> None:
    busy = "import threading\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()\n"
    ran = started(tmp_path / "experiment.py", busy + EXPERIMENT.format(guard="if True:"))
    assert ran.stdout.startswith("ERROR None"), ran.stderr
    assert "start it below" in ran.stdout


async def test_a_trial_may_be_asked_after_its_end(driver: Driver) -> None:
    trial = driver.trial("Counter")
    driver.executor.end(trial)
    driver.executor.proceed(trial)
    assert not driver.executor.change(trial, {}, None)
    assert await driver.executor.next_events(0.0) == []
