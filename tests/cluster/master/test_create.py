"""Where a job is made: in the directory that it is given, or in one of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from counterpoint.cluster import JobBuilder, JobExists, JobHandle, JobSpec, PrimeMaster


def spec() -> JobSpec:
    return JobBuilder("mine").role("work", worker="tests.cluster.master.tiny_workers:Counter", task=True).build()


def test_a_job_without_a_directory_gets_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "mine-2").mkdir(parents=True)
    (tmp_path / "outputs" / "mine-2" / "of another").touch()
    (tmp_path / "outputs" / "mine-3").mkdir()
    with ThreadPoolExecutor(4) as threads:
        made = [found.result() for found in [threads.submit(PrimeMaster.create, spec()) for _ in range(4)]]
    assert sorted(master.directory for master in made) == [
        tmp_path / "outputs" / name for name in ("mine", "mine-3", "mine-4", "mine-5")
    ]
    assert {JobHandle(master.directory).status().stage for master in made} == {"INIT"}


def test_a_directory_holds_one_job(tmp_path: Path) -> None:
    PrimeMaster.create(spec(), tmp_path / "job")
    with pytest.raises(JobExists, match=rf"{tmp_path / 'job'} has a job already"):
        PrimeMaster.create(spec(), tmp_path / "job")
