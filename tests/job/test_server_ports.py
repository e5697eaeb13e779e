"""The ports of a job's servers: chosen where the file sets none, and each job's own."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from counterpoint.inference.port_claim import claimed
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load, to_toml
from counterpoint.job.evaluation.server import free_port as free_port_of
from counterpoint.job.server_ports import as_started, held_ports
from counterpoint.transport.errors import Obstructed, UserError
from tests.support.ports import free_port, taken_port


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> int:
    """Where the search begins: at ports that other tests do not use."""
    port = free_port()
    monkeypatch.setattr("counterpoint.job.server_ports.FIRST_PORT", port)
    return port


def urls(*ports: int) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


def started(job: JobConfig) -> JobConfig:
    """Leaves what a start leaves, and returns the job."""
    job.output_dir.mkdir(exist_ok=True)
    (job.output_dir / "job.json").write_text(job.model_dump_json())
    return job


def test_a_file_without_a_port_is_loaded_without_addresses(job_file: Path, tmp_path: Path) -> None:
    job = load(JobConfig, job_file, [])
    assert job.inference.port == 0
    (tmp_path / "shown.toml").write_text(shown := to_toml(job))
    assert "8000" not in shown
    assert load(JobConfig, tmp_path / "shown.toml", []) == job
    assert JobConfig.model_validate(job.model_dump(mode="json")).with_port(1).orchestrator.inference.urls == urls(1)
    with pytest.raises(UserError, match=r"orchestrator\.inference\.urls = .* since inference\.port is unset"):
        load(JobConfig, job_file, ["--orchestrator.inference.urls", '["http://127.0.0.1:8001"]'])
    on_ray = load(JobConfig, job_file, ["--backend", "ray"])
    assert (on_ray.inference.port, on_ray.orchestrator.inference.urls) == (8000, urls(8000))
    with held_ports(on_ray, left_running=False) as held:
        assert held is on_ray


def test_jobs_at_once_get_ports_of_their_own(job_file: Path, first: int) -> None:
    job = load(JobConfig, job_file, ["--inference.replicas", "2"])
    with ExitStack() as stack:
        held = [stack.enter_context(held_ports(job, left_running=False)) for _ in range(3)]
        assert [each.inference.port for each in held] == [first, first + 2, first + 4]
        assert held[1].orchestrator.inference.urls == urls(first + 2, first + 3)
        assert [held[2].server(position).port for position in range(2)] == [first + 4, first + 5]
        set_to = load(JobConfig, job_file, ["--inference.port", str(first + 3)])
        with pytest.raises(Obstructed, match=rf"inference\.port = {first + 3}: cannot listen on .*: process \d+ \("):
            stack.enter_context(held_ports(set_to, left_running=False))
        assert free_port_of("127.0.0.1", first) != first, (
            "an evaluation takes no port of a job whose servers do not run yet"
        )
    with held_ports(job, left_running=False) as again:
        assert again.inference.port == first


def test_a_port_is_not_chosen_that_something_else_has(job_file: Path, first: int) -> None:
    job = load(JobConfig, job_file, ["--prometheus_port", str(first), "--serve.port", str(first + 2)])
    with claimed("127.0.0.1", first + 1), held_ports(job, left_running=False) as held:
        assert held.inference.port == first + 3
    elsewhere = job.model_copy(update={"inference": job.inference.model_copy(update={"host": "192.0.2.1"})})
    with pytest.raises(Obstructed, match=r"cannot listen on 192\.0\.2\.1:"), held_ports(elsewhere, left_running=False):
        pass  # it is no address of this machine


def test_a_resume_takes_the_last_port_unless_it_is_taken(job_file: Path, first: int) -> None:
    job = load(JobConfig, job_file, [])
    assert as_started(job) is job
    with taken_port() as port:
        started(job.with_port(port))
        assert as_started(job).orchestrator.inference.urls == urls(port), "also while its own servers listen there"
        with held_ports(job, left_running=False) as held:
            assert held.inference.port == first
        with held_ports(job, left_running=True) as held:
            assert held.inference.port == port, "its own servers"
        set_to = load(JobConfig, job_file, ["--inference.port", str(port)])
        with pytest.raises(Obstructed, match="Address already in use"), held_ports(set_to, left_running=False):
            pass
    with held_ports(job, left_running=False) as held:
        assert held.inference.port == port
    assert as_started(set_to) is set_to
    (job.output_dir / "job.json").write_text(json.dumps({"inference": {"port": "8000 or so"}}))
    with held_ports(job, left_running=False) as held:
        assert held.inference.port == first
