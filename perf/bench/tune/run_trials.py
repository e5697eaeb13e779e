"""Runs many trials of one step that does nothing, as a child of the bench: ours, or Ray Tune's. Prints its figures as JSON.

python -m perf.bench.tune.run_trials ours|ray COUNT [reuse]
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import tempfile
import time
from typing import Any

CPUS = 2
"""So many trials at once."""


def no_op(config: dict[str, Any]) -> dict[str, Any]:
    """One result, and nothing else."""
    return {"value": 1}


def ours(count: int, reuse: bool, directory: str) -> float:
    """Returns the seconds of so many trials, from the call to its return: journal, loggers and fork server included."""
    from tune import run_experiments
    from tune.executors.local import LocalTrialExecutor

    executor = LocalTrialExecutor(cpus=CPUS, gpus=0, reuse_actors=reuse)
    experiment = {"bench": {"run": no_op, "num_samples": count, "local_dir": directory}}
    began = time.perf_counter()
    trials = run_experiments(experiment, trial_executor=executor, verbose=0)
    seconds = time.perf_counter() - began
    done = sum(trial.status == "TERMINATED" and trial.num_results == 1 for trial in trials)
    assert done == count, f"{done} of {count} trials ended with one result"
    return seconds


def rays(count: int, reuse: bool, directory: str) -> float:
    """Returns the same of Ray Tune, on a Ray that has started already."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import tune

    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        "local",
        num_cpus=CPUS,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
        _temp_dir=os.path.join(directory, "r"),
    )

    def step(config: dict[str, Any]) -> None:
        tune.report({"value": 1})

    began = time.perf_counter()
    found = tune.run(
        step, num_samples=count, storage_path=directory, resources_per_trial={"cpu": 1}, reuse_actors=reuse, verbose=0
    )
    seconds = time.perf_counter() - began
    done = sum(trial.status == "TERMINATED" for trial in found.trials)
    assert done == count, f"{done} of {count} trials ended"
    ray.shutdown()
    return seconds


if __name__ == "__main__":
    kind, number, *asked = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as place:
        spent = (ours if kind == "ours" else rays)(int(number), asked == ["reuse"], place)
    print(json.dumps({"seconds": spent, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
