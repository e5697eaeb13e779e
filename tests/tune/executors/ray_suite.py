"""The tests of the executor on Ray. They need Ray in their own process, so `test_on_ray.py` runs this file in another."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.polling import until
from tests.support.ray_nodes import ray_files
from tests.tune.executors.contract import *  # noqa: F403
from tests.tune.executors.driver import TRAINABLES, Driver, is_alive, parent_of
from tune import run_experiments
from tune.errors import TuneError
from tune.executors.executor import Failed
from tune.executors.on_ray import RayTrialExecutor

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    with ray_files() as files:
        with pytest.raises(TuneError, match="nothing answers at the address"):
            RayTrialExecutor("127.0.0.1:1")
        made = Cluster(initialize_head=True, head_node_args=NODE | {"temp_dir": files})
        first = RayTrialExecutor(made.address)  # keeps the one connection for the whole session
        yield made
        first._ray.disconnect()
        made.shutdown()


@pytest.fixture
async def driver(tmp_path: Path, ray_cluster: Any) -> AsyncIterator[Driver]:
    executor = RayTrialExecutor(ray_cluster.address)
    yield Driver(executor, tmp_path)
    await executor.cleanup()


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
        trial_executor=RayTrialExecutor(ray_cluster.address),
        verbose=0,
    )
    assert [(trial.status, trial.num_results) for trial in trials] == [("TERMINATED", 3)] * 2
