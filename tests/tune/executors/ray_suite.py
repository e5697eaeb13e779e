"""The tests of the executor on Ray. They need Ray in their own process, so `test_on_ray.py` runs this file in another."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.tune import run_experiments
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.executor import Failed
from counterpoint.tune.executors.on_ray import RayTrialExecutor
from counterpoint.tune.registry import path_of
from counterpoint.tune.resources import Resources
from counterpoint.tune.trial import Trial
from tests.support.polling import until
from tests.support.ray_nodes import ray_files
from tests.tune.executors.contract import *  # noqa: F403
from tests.tune.executors.driver import TRAINABLES, Driver, is_alive, parent_of

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    with ray_files() as files:
        with pytest.raises(TuneError, match="nothing answers at the address"):
            RayTrialExecutor(address="127.0.0.1:1")
        made = Cluster(initialize_head=True, head_node_args=NODE | {"temp_dir": files})
        first = RayTrialExecutor(address=made.address)  # keeps the one connection for the whole session
        yield made
        first._ray.disconnect()
        made.shutdown()


@pytest.fixture
async def driver(tmp_path: Path, ray_cluster: Any) -> AsyncIterator[Driver]:
    executor = RayTrialExecutor(address=ray_cluster.address)
    yield Driver(executor, tmp_path)
    await executor.close()


async def test_a_killed_trial_and_a_killed_actor_fail(driver: Driver) -> None:
    for victim, said in ((0, "killed by SIGKILL"), (2, "was lost with its actor")):
        trial = driver.trial("Counter", f"killed{victim}")
        await driver.begin(trial)
        line = [(await driver.result(trial))["pid"]]
        for _ in range(victim):
            line.append(parent_of(line[-1]))
        os.kill(line[-1], 9)
        assert said in (await driver.next(Failed, trial)).error
        await until(lambda: not any(map(is_alive, line)), "the end of all processes")  # noqa: B023


def test_an_experiment_runs_on_ray(tmp_path: Path, ray_cluster: Any) -> None:
    trials = run_experiments(
        {"experiment": {"run": f"{TRAINABLES}:reports", "num_samples": 2, "local_dir": str(tmp_path)}},
        trial_executor=RayTrialExecutor(address=ray_cluster.address),
        verbose=0,
    )
    assert [(trial.status, trial.num_results) for trial in trials] == [("TERMINATED", 3)] * 2


def test_an_actor_is_used_anew_until_other_needs_come(tmp_path: Path, ray_cluster: Any) -> None:
    executor = RayTrialExecutor(reuse_actors=True, address=ray_cluster.address)
    pids = []
    try:
        for name, cpu in (("first", 1), ("second", 1), ("third", 2)):
            trial = Trial(f"{TRAINABLES}:Resettable", {}, name, str(tmp_path), resources=Resources(cpu=cpu))
            assert executor.start_trial(trial), trial.error_msg
            assert executor.get_next_available_trial() is trial
            pids.append(executor.fetch_result(trial)["pid"])
            executor.stop_trial(trial)
    finally:
        executor.cleanup()
    assert pids[0] == pids[1] != pids[2]


def test_it_is_driven_by_the_documented_calls(tmp_path: Path, ray_cluster: Any) -> None:
    executor = RayTrialExecutor(refresh_period=0.0, address=ray_cluster.address)
    trial = Trial(f"{TRAINABLES}:Counter", {}, "called", str(tmp_path))
    try:
        executor.on_step_begin(None)
        assert executor.has_resources(Resources(cpu=2))
        executor.start_trial(trial)
        assert executor.fetch_result(trial)["count"] == 1
        executor.pause_trial(trial)
        executor.resume_trial(trial)
        assert executor.fetch_result(trial)["count"] == 2
        assert executor.get_running_trials() == [trial]
        assert not executor.start_trial(Trial(path_of(lambda config: None), {}, "closure", str(tmp_path)))
    finally:
        executor.cleanup()


def test_without_an_address_none_is_started_if_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(TuneError, match="no address of a Ray cluster is given"):
        RayTrialExecutor(ray_auto_init=False)
