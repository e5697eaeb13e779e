"""The errors of a job's spec are those of a configuration: file, line, key, and the nearest one."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from counterpoint.cluster import (
    ClusterError,
    JobBuilder,
    JobHandle,
    JobSpec,
    PrimeMaster,
    Resources,
    RestartScope,
    load_spec,
    submit,
)
from counterpoint.cluster.job_files import JOB_FILE
from counterpoint.cluster.worker import Worker
from counterpoint.transport.errors import UserError
from tests.cluster.master import tiny_workers
from tests.support.polling import DEADLINE_SECONDS


def test_a_builder_makes_the_spec_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'name = "demo"\n[[roles]]\nname = "a"\nworker = "m.n:C"\ncount = 2\nrestart = "job"\nconfig = {steps = 3}\n'
        '[roles.resources]\ncpu = 0.5\n[[roles]]\nname = "b"\ncommand = ["sleep", "1"]\n'
    )
    built = (
        JobBuilder("demo")
        .role("a", worker="m.n:C", count=2, restart="job", config={"steps": 3}, resources={"cpu": 0.5})
        .role("b", command=["sleep", 1])  # type: ignore[list-item]
        .build()
    )
    assert load_spec(file) == load_spec(str(file)) == built
    assert built.role("a").restart is RestartScope.JOB
    assert built.role("a").resources == Resources(cpu=0.5)


def test_an_unknown_key_is_named_with_its_line_and_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('name = "demo"\n[[roles]]\nname = "a"\nworker = "m:C"\ncuont = 2\n')
    with pytest.raises(UserError) as error:
        load_spec(file)
    assert f"{file}:5:1: roles[0].cuont = 2" in str(error.value)
    assert "unknown key; the nearest is roles[0].count" in str(error.value)
    assert "1 error in the configuration" in str(error.value)


def test_a_class_stands_for_its_import_path() -> None:
    spec = JobBuilder("demo").role("a", worker=tiny_workers.Service).build()
    assert spec.role("a").worker == "tests.cluster.master.tiny_workers:Service"

    class Local(Worker):
        pass

    with pytest.raises(UserError, match="defined inside something else"):
        JobBuilder("demo").role("a", worker=Local)
    for given in (test_a_class_stands_for_its_import_path, 3, object()):
        with pytest.raises(UserError, match="is no class"):
            JobBuilder("demo").role("a", worker=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [object(), float("nan"), float("inf"), date(2026, 1, 1), UUID(int=1), Resources, {1: 2}, {1, 2}, 2**70]
)
def test_a_value_that_json_does_not_have_is_named(value: Any) -> None:
    """Also those that a library of JSON would change in silence."""
    with pytest.raises(UserError, match=r"config\.model of role 'a' is \["):
        JobBuilder("demo").role("a", worker="m:C", config={"model": [value]}).build()


@pytest.mark.parametrize("given", [{"name": "demo"}, JobBuilder("demo"), None, "job.toml"])
def test_what_is_no_spec_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a JobSpec, as JobBuilder\(\.\.\.\)\.build\(\)"):
        PrimeMaster.create(given, tmp_path / "job")


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("tests.cluster.master.tiny_workers:Servise", "defines no Servise; the nearest is Service"),
        ("tests.cluster.master.nowhere:C", "there is no module 'nowhere' in tests.cluster.master"),
        ("nowhere_at_all:C", "there is no module 'nowhere_at_all'"),
        ("json.decoder.deeper:C", "json.decoder is no package"),
        ("__main__:C", "another program in each process"),
    ],
)
def test_a_class_that_is_not_there_is_named_at_submission(tmp_path: Path, worker: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"role 'a': worker = '{worker}': .*{message}"):
        submit(JobBuilder("demo").role("a", worker=worker).build(), tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_an_unknown_backend_is_named(tmp_path: Path) -> None:
    spec = JobBuilder("demo").role("a", command=["true"]).build()
    with pytest.raises(ClusterError, match="backend = 'locl': expected one of local, ray"):
        submit(spec, tmp_path / "job", "locl")


def test_a_directory_without_a_job_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"has no job: there is no cluster_job.json"):
        JobHandle(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "spec is missing"),
        ({"spec": 3}, r"spec: .*, found 3"),
        ({"spec": {"name": "demo", "roles": 3}}, r"spec\.roles: .*, found 3"),
    ],
)
def test_a_damaged_job_is_named_with_its_key_in_one_line(tmp_path: Path, content: object, said: str) -> None:
    (tmp_path / JOB_FILE).write_text(json.dumps(content))
    with pytest.raises(ClusterError, match=rf"/cluster_job.json cannot be read: {said}$"):
        JobHandle(tmp_path)


@pytest.mark.slow
def test_importing_the_package_imports_nothing_of_it() -> None:
    program = "import counterpoint.cluster, sys; print([one for one in sys.modules if one.startswith('counterpoint.cluster.')])"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    assert shown.stdout.strip() == "[]"


def test_a_file_can_name_a_command_that_does_not_notify(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('name = "plain"\n[[roles]]\nname = "a"\ncommand = ["true"]\nnotifies = false\n')
    spec = load_spec(file)
    role = spec.role("a")
    assert (role.ready_timeout_seconds, role.silence_timeout_seconds) == (None, None)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    file.write_text(file.read_text() + "silence_timeout_seconds = 3\n")
    with pytest.raises(UserError, match="leave the timeouts out"):
        load_spec(file)
    file.write_text(file.read_text().replace('command = ["true"]', 'worker = "a:B"'))
    with pytest.raises(UserError, match="only a command can be ready without a notification"):
        load_spec(file)
