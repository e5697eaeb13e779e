"""The script of `examples/elastic_training` under the real ElasticMaster and gloo: one worker, then one more."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from cluster.elastic.config import elastic_config
from cluster.elastic.elastic_worker import ElasticWorker
from cluster.elastic.ranks import alone
from cluster.spec import JobSpec
from tests.cluster.elastic.troupe import mastered, troupe
from tests.support.polling import wait_until

EXAMPLE = Path(__file__).parents[3] / "examples" / "elastic_training"


def steps_of(directory: Path) -> list[tuple[int, int]]:
    """Step and number of ranks, as the script wrote them, in its whole lines."""
    file = directory / "progress.jsonl"
    data = file.read_bytes() if file.exists() else b""
    return [(entry["step"], entry["ranks"]) for entry in map(json.loads, data[: data.rfind(b"\n") + 1].splitlines())]


@pytest.mark.slow
def test_a_disturbed_run_ends_where_an_undisturbed_one_ends(tmp_path: Path) -> None:
    script = str(EXAMPLE / "train.py")
    undisturbed = alone((sys.executable, script, str(tmp_path / "undisturbed"), "--steps", "40"), 1)
    config = {"module": "", "script": script, "check": False, "min_workers": 1, "max_workers": 2, "join_seconds": 60}
    directory = tmp_path / "disturbed"
    slow, fast = ([str(directory), "--steps", "40", "--step-seconds", seconds] for seconds in ("600", "0"))
    try:
        with troupe(tmp_path, 1, arguments=slow, **config) as job, mastered(job) as master:
            wait_until(lambda: len(steps_of(directory)) == 1, "the first step of one rank", seconds=120)
            worker = job.lives["trainer-0"].worker
            assert isinstance(worker, ElasticWorker)
            job.config = job.config | {"arguments": fast}
            worker.config = elastic_config(job.config)
            job.begin(1)
            assert master.thread is not None
            master.thread.join(120)
            assert master.error is None
            assert not master.thread.is_alive()
        wait_until(lambda: undisturbed.poll() is not None, "the undisturbed run", seconds=120)
        assert undisturbed.succeeded, undisturbed.failure
    finally:
        undisturbed.close()
    results = [json.loads((path / "result.json").read_text()) for path in (directory, tmp_path / "undisturbed")]
    assert results[0] == results[1]
    assert steps_of(directory) == [(1, 1), *((step, 2) for step in range(2, 41))]


def test_the_examples_job_is_valid() -> None:
    job = JobSpec.model_validate(tomllib.loads((EXAMPLE / "job.toml").read_text()))
    config = elastic_config(job.role("trainer").config)
    assert Path(config.script).name == "train.py"
    rules = config.rules(job.role("trainer").count)
    assert (rules.min_workers, rules.max_workers) == (job.role("trainer").fewest, job.role("trainer").most)
