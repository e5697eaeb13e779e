"""Document 001, sweeps: its rules, and its worked example as `examples/sweep/train_tiny_sweep.py` has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from counterpoint.cluster import ResourceConfig
from counterpoint.sweep import (
    STATUS_FAILED,
    STATUS_SUCCESS,
    StepAlreadyDone,
    SweepTarget,
    UnsafeStoreError,
    claim_and_run,
    extras_for_resources,
    resolve_training_env,
    run_training_on_worker,
    step_lock,
    sweep_status,
)
from counterpoint.sweep.open_store import open_store
from counterpoint.transport.errors import UserError
from examples.sweep.train_tiny_sweep import targets as grid
from tests.support.job_processes import kill_processes_of

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "sweep" / "train_tiny_sweep.py"


def targets(*names: str) -> list[SweepTarget[str]]:
    return [SweepTarget(target_id=name, config=name) for name in names]


def states(root: Path) -> dict[str, str]:
    return {each.target_id: each.state for each in sweep_status(root)}


def test_workers_race_for_the_list_and_each_target_runs_once(tmp_path: Path) -> None:
    ran: list[str] = []

    def run_fn(target: SweepTarget[str]) -> None:
        ran.append(target.config)

    workers = [threading.Thread(target=claim_and_run, args=(tmp_path, targets(*"abcdef"), run_fn)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(ran) == list("abcdef")
    assert states(tmp_path) == dict.fromkeys("abcdef", STATUS_SUCCESS)


def test_the_lock_is_at_root_and_target_id_and_a_finished_target_raises(tmp_path: Path) -> None:
    sweep_root = str(tmp_path)
    claim_and_run(sweep_root, targets("a"), lambda target: None)
    with pytest.raises(StepAlreadyDone), step_lock(f"{sweep_root}/a"):
        raise AssertionError("entered")
    assert (tmp_path / "a").is_dir()


def test_a_failed_target_is_retried_by_a_later_peer(tmp_path: Path) -> None:
    def failing(target: SweepTarget[str]) -> None:
        raise RuntimeError(target.config)

    with pytest.raises(RuntimeError, match="a"):
        claim_and_run(str(tmp_path), targets("a", "b"), failing, heartbeat=0.05, lease=30)
    assert states(tmp_path) == {"a": STATUS_FAILED}
    claim_and_run(str(tmp_path), targets("a", "b"), lambda target: None, heartbeat=0.05, lease=30)
    assert states(tmp_path) == {"a": STATUS_SUCCESS, "b": STATUS_SUCCESS}


@pytest.mark.parametrize("scheme", ["az", "abfs", "hdfs", "http"])
def test_a_store_without_a_conditional_write_here_is_refused_by_name(scheme: str) -> None:
    with pytest.raises(UnsafeStoreError, match=f"none is known for {scheme}://"):
        claim_and_run(f"{scheme}://bucket/sweeps", targets("a"), lambda target: None)


def test_other_names_of_known_stores_open_them(tmp_path: Path) -> None:
    assert open_store(f"local://{tmp_path}").root == str(tmp_path)
    assert open_store("s3a://bucket/a").root == open_store("s3://bucket/a").root
    with patch("counterpoint.sweep.stores.gs.GoogleStore", lambda bucket, prefix: (bucket, prefix)):
        assert open_store("gcs://bucket/a") == ("bucket", "a")  # type: ignore[comparison-overlap]


def test_the_worked_example_has_a_grid_of_three_by_three() -> None:
    assert len({target.target_id for target in grid}) == len(grid) == 9


@pytest.mark.slow
def test_the_worked_example_trains_the_grid_and_a_second_submission_finds_nothing_to_do(tmp_path: Path) -> None:
    """Two by two of its points, one more than workers; each is a start of the trainer."""
    example, whole = tmp_path / EXAMPLE.name, "product([3e-4, 1e-3, 3e-3], [0.0, 0.1, 0.2])"
    text = EXAMPLE.read_text()
    assert text.count(whole) == 1
    example.write_text(text.replace(whole, "product([3e-4, 1e-3], [0.0, 0.1])"))
    names = [f"tiny-lr={rate}-wd={decay}" for rate in ("0.0003", "0.001") for decay in ("0", "0.1")]
    variables = {"COUNTERPOINT_REGION_ROOT": f"{tmp_path}/{{region}}"}
    try:
        for region in ("eu-west", "us-east"):
            subprocess.run(
                [sys.executable, str(example)],
                cwd=tmp_path,
                env=dict(os.environ) | variables | {"COUNTERPOINT_REGION": region},
                check=True,
                timeout=900,
            )
    finally:
        kill_processes_of(tmp_path / "outputs")
    root = tmp_path / "us-central2" / "sweeps" / "train-tiny-sweep"
    assert set(names) < {target.config.name for target in grid}
    assert states(root) == dict.fromkeys(names, STATUS_SUCCESS)
    for name in names:
        rows = (tmp_path / "eu-west" / name / "trainer" / "metrics.jsonl").read_bytes().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "us-east").iterdir()) == ["data", "models"]


def test_the_environment_of_a_training_follows_its_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERPOINT_REGION_ROOT", "/mnt/{region}")
    monkeypatch.setenv("COUNTERPOINT_REGION", "eu-west")
    env = resolve_training_env(base_env={"A": "1"}, resources=ResourceConfig(cpu=2))
    assert env == {"A": "1", "OMP_NUM_THREADS": "2", "COUNTERPOINT_REGION_ROOT": "/mnt/{region}"}
    assert (extras_for_resources(ResourceConfig()), extras_for_resources(ResourceConfig(gpu=1))) == (["cpu"], ["gpu"])


def test_a_training_needs_a_directory_for_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, Any] = {"model": "tiny-dense"}
    with pytest.raises(UserError, match="is no directory"):
        run_training_on_worker("a", config, override_output_path="gs://bucket/a")
