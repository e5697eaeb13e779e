"""`counterpoint run --backend ray` around workers that pretend, on a Ray cluster of several nodes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.backends.ray_places import job_key
from counterpoint.cluster.job_files import read_job
from counterpoint.job.directory import control_directory, orchestrator_of
from counterpoint.job.processes_file import read_workers
from counterpoint.models import write_tokenizer
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.ray_nodes import RayNodes, workers_on_ray

pytestmark = pytest.mark.slow


@dataclass
class JobOnRay:
    """A job, and the commands that ran it."""

    file: Path
    model: Path
    output: Path
    address: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, behaviour: str, *arguments: str, lease: float = 10.0) -> subprocess.Popen[str]:
        given = [behaviour, str(self.file), "--model", str(self.model), "--backend", "ray", *arguments]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.fake_job", *given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"RAY_ADDRESS": self.address, "CLUSTER_LEASE": str(lease)},
        )
        self.started.append(process)
        return process

    def steps(self) -> int:
        metrics = self.output / "run_test" / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for_steps(self, process: subprocess.Popen[str], count: int) -> None:
        self.wait_until(process, lambda: self.steps() >= count, f"{count} steps")

    def wait_until(self, process: subprocess.Popen[str], condition: Callable[[], object], what: str) -> None:
        def holds() -> bool:
            assert process.poll() is None, process.communicate()
            return bool(condition())

        wait_until(holds, what, DEADLINE_SECONDS)

    def worker(self, name: str) -> dict[str, Any]:
        return next(worker for worker in read_workers(self.output) if worker["name"] == name)

    def processes(self) -> list[int]:
        control = control_directory(self.output)
        return list(workers_on_ray(job_key(read_job(control).spec.name, control))) if control.exists() else []


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(2)
    yield nodes
    nodes.close()


@pytest.fixture
def job(job_file: Path, tmp_path: Path, ray_nodes: RayNodes) -> Iterator[JobOnRay]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    write_tokenizer(model, longest=1024)
    made = JobOnRay(job_file, model, tmp_path / "out", ray_nodes.address)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()
    wait_until(lambda: not made.processes(), "the end of every process", DEADLINE_SECONDS)


def test_a_job_outlives_its_command_and_stops_in_order(job: JobOnRay) -> None:
    first = job.start("hang", lease=60.0)
    job.wait_for_steps(first, 3)
    job.wait_until(first, lambda: job.worker("orchestrator")["state"] == "ready", "the command to know it")
    first.kill()
    first.communicate()
    holder, seen = orchestrator_of(job.output, "test"), job.worker("orchestrator")
    assert holder is not None
    second = job.start("hang", "--resume", lease=60.0)
    job.wait_until(second, lambda: job.worker("orchestrator")["since"] > seen["since"], "the job to be adopted")
    job.wait_until(second, lambda: job.worker("orchestrator")["pid"] == holder.pid, "the orchestrator's heartbeat")
    second.send_signal(signal.SIGINT)
    output, errors = second.communicate(timeout=DEADLINE_SECONDS)
    assert second.returncode == 130, errors
    assert "starting" not in output
    assert not job.processes()
    assert job.steps() == 3


def test_a_job_outlives_a_node(job: JobOnRay, ray_nodes: RayNodes) -> None:
    process = job.start("wait")
    job.wait_for_steps(process, 3)
    node = job.worker("orchestrator")["node"]
    ray_nodes.remove(node)
    job.wait_until(process, lambda: job.worker("orchestrator")["last_death"], "the loss to be noticed")
    (job.output / "run_test" / "control" / "go").touch()
    output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, output + errors
    assert f"it was lost with node {node}" in output
    assert job.steps() == 20
    assert not job.processes()


def test_without_a_cluster_nothing_is_begun(job: JobOnRay) -> None:
    for address, code, words in (
        ("", 2, "no address of a Ray cluster is given; set RAY_ADDRESS to HOST:PORT"),
        ("127.0.0.1:1", 75, "nothing answers at the address of the Ray cluster, 127.0.0.1:1"),
    ):
        job.address = address
        process = job.start("finish")
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == code
        assert words in errors
    assert not job.output.exists()
