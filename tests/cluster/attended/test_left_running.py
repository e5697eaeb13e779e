"""What an earlier process left on a Ray cluster that may be gone. `tests/cli/test_run_on_ray.py` has one that lives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from counterpoint.cluster.attended.left_running import left_running
from counterpoint.cluster.backends.ray_cluster import RayCluster
from counterpoint.cluster.errors import BackendError
from counterpoint.cluster.job_files import JOB_FILE, OUTCOME_FILE, JobFile, OutcomeFile, write_privately
from counterpoint.cluster.spec import JobSpec, RoleSpec

SPEC = JobSpec(name="job", roles=(RoleSpec(name="work", command=("true",)),), lease_seconds=3.0)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, which takes no time; and no cluster answers."""
    seconds: list[float] = []

    async def sleep(duration: float) -> None:
        seconds.append(duration)

    def connect(cluster: RayCluster) -> None:
        raise BackendError(f"nothing answers at {cluster.address}")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(RayCluster, "connect", connect)
    return seconds


async def test_a_cluster_that_is_gone_is_waited_for_until_its_keepers_have_ended(
    tmp_path: Path, slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    write_privately(tmp_path / JOB_FILE, JobFile(spec=SPEC, backend="ray", options={"address": "10.0.0.5:6379"}))
    assert not await left_running(tmp_path)
    assert slept == [6.0]
    assert "nothing answers at 10.0.0.5:6379" in caplog.text


async def test_a_job_that_has_ended_or_never_was_left_nothing(tmp_path: Path, slept: list[float]) -> None:
    assert not await left_running(tmp_path)
    write_privately(tmp_path / JOB_FILE, JobFile(spec=SPEC, backend="ray", options={"address": "10.0.0.5:6379"}))
    write_privately(tmp_path / OUTCOME_FILE, OutcomeFile(code=0, reason="done"))
    assert not await left_running(tmp_path)
    assert not slept
