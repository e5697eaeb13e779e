"""Where a job's roles may be on Ray, what they reserve there, and how its servers are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load, to_toml
from counterpoint.job.placement import ServersFile, placements
from counterpoint.job.workers import sections_of, specification
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.cores import CORES_VARIABLE, own_cores

ON_RAY = ("--backend", "ray")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("secret\n")
    return path


def apart(key: Path) -> list[str]:
    """Flags of a job whose roles reach each other from any node."""
    anywhere = ["--inference.host", "0.0.0.0", "--inference.api_key_file", str(key)]
    return [*ON_RAY, *anywhere, "--transport.address", "tcp://0.0.0.0:5555"]


def cores_of(job: JobConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """The cores that each role of a machine of eight has."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    cores: dict[str, int | None] = {}
    for role in specification(job, dict.fromkeys(sections_of(job), job_file)).roles:
        monkeypatch.delenv(CORES_VARIABLE, raising=False)
        for name, value in role.environment.items():
            monkeypatch.setenv(name, value)
        cores[role.name] = own_cores()
    return cores


def groups(job: JobConfig) -> dict[str, str | None]:
    return {name: placed.collocate for name, placed in placements(job).items()}


def complaint(job_file: Path, *flags: str) -> str:
    with pytest.raises(UserError) as caught:
        load(JobConfig, job_file, [*ON_RAY, *flags])
    return str(caught.value)


def test_trainer_and_servers_divide_the_cores(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load(JobConfig, job_file, ["--inference.replicas", "2", "--trainer.threads", "null"])
    assert cores_of(job, job_file, monkeypatch) == {
        "inference_0": 2,
        "inference_1": 2,
        "trainer": 2,
        "orchestrator": None,
    }
    job = load(JobConfig, job_file, ["--inference.replicas", "2", "--trainer.threads", "1"])
    cores = cores_of(job, job_file, monkeypatch)
    assert (cores["inference_0"], cores["inference_1"]) == (3, 3), "the trainer takes what it was given"
    job = load(JobConfig, job_file, ["--inference.replicas", "8", "--trainer.threads", "7"])
    assert cores_of(job, job_file, monkeypatch)["inference_0"] == 1


def test_on_one_machine_nothing_is_reserved(job_file: Path) -> None:
    job = load(JobConfig, job_file, ["--gpus.trainer", "[3]"])
    roles = {role.name: role for role in specification(job, dict.fromkeys(sections_of(job), job_file)).roles}
    assert {role.collocate for role in roles.values()} == {None}
    assert not any(role.resources.cpu or role.resources.gpu for role in roles.values())
    assert roles["trainer"].environment["CUDA_VISIBLE_DEVICES"] == "3"


def test_roles_that_use_addresses_of_their_machine_are_together(job_file: Path, key: Path) -> None:
    assert set(groups(load(JobConfig, job_file, [*ON_RAY])).values()) == {"job"}
    wire_only = load(JobConfig, job_file, apart(key)[:-2])
    assert groups(wire_only) == {"inference_0": None, "trainer": "job", "orchestrator": "job"}
    servers_only = load(JobConfig, job_file, [*ON_RAY, "--transport.address", "tcp://0.0.0.0:5555"])
    assert groups(servers_only) == {"inference_0": "job", "trainer": None, "orchestrator": "job"}
    assert set(groups(load(JobConfig, job_file, apart(key))).values()) == {None}


def test_gpus_are_reserved_by_their_number(job_file: Path, key: Path) -> None:
    flags = ["--inference.replicas", "2", "--inference.tensor_parallel_size", "2", "--gpus.inference", "[0, 1, 2, 3]"]
    job = load(JobConfig, job_file, [*apart(key), *flags, "--gpus.trainer", "[4]"])
    placed = placements(job)
    assert {name: placed[name].resources.gpu for name in placed} == {
        "inference_0": 2, "inference_1": 2, "trainer": 1, "orchestrator": 0
    }  # fmt: skip
    roles = specification(job, dict.fromkeys(sections_of(job), job_file)).roles
    assert [role.resources.gpu for role in roles] == [2, 2, 1, 0]
    assert not any("CUDA_VISIBLE_DEVICES" in role.environment for role in roles), "Ray chooses which"


def test_roles_that_share_a_gpu_are_together(job_file: Path, key: Path) -> None:
    job = load(JobConfig, job_file, [*apart(key), "--trainer.device", "cuda"])
    assert groups(job) == {"inference_0": "job", "trainer": "job", "orchestrator": "job"}
    assert {name: placed.resources.gpu for name, placed in placements(job).items()} == {
        "inference_0": 0.5, "trainer": 0.5, "orchestrator": 0
    }  # fmt: skip
    two = ["--inference.tensor_parallel_size", "2", "--gpus.inference", "[0, 1]", "--gpus.trainer", "[1]"]
    assert "gpus: inference_0 has [0, 1], of which others have some, too" in complaint(job_file, *two)


def test_an_address_of_one_certain_machine_is_refused(job_file: Path, key: Path) -> None:
    host = complaint(job_file, "--inference.host", "10.0.0.7", "--inference.api_key_file", str(key))
    assert "inference.host = '10.0.0.7' is one machine's address" in host
    assert "transport.address = 'tcp://10.0.0.7:5555' is one machine's address" in complaint(
        job_file, "--transport.address", "tcp://10.0.0.7:5555"
    )
    for address in ("ipc:///tmp/wire", "tcp://127.0.0.1:5555", "tcp://[::1]:5555"):
        load(JobConfig, job_file, [*ON_RAY, "--transport.address", address])


def test_servers_on_any_node_are_found_by_a_file(job_file: Path, key: Path, tmp_path: Path) -> None:
    job = load(JobConfig, job_file, [*apart(key), "--inference.replicas", "2", "--inference.port", "8100"])
    written = tmp_path / "orchestrator.toml"
    written.write_text(to_toml(sections_of(job)["orchestrator"]))
    pool = load(RunConfig, written, []).inference
    file = ServersFile(job)
    assert (pool.urls, pool.urls_file, pool.api_key_file) == ([], file.path, key)
    job.output_dir.mkdir()

    def at(*nodes: str) -> list[WorkerView]:
        names = ("inference_0", "inference_1", "trainer")
        return [
            WorkerView(name, State.READY, 0.0, None, "", node=node) for name, node in zip(names, nodes, strict=True)
        ]

    for nodes, text in (
        (("", "", "10.0.0.9-aa"), ""),
        (("10.0.0.1-aa", "10.0.0.2-bb", ""), "http://10.0.0.1:8100\nhttp://10.0.0.2:8101\n"),
        (("", "10.0.0.2-bb", ""), "http://10.0.0.1:8100\nhttp://10.0.0.2:8101\n"),
        (("10.0.0.3-cc", "10.0.0.2-bb", ""), "http://10.0.0.3:8100\nhttp://10.0.0.2:8101\n"),
    ):
        file.write(State.RUNNING, at(*nodes))
        assert file.path.read_text() == text


def test_servers_with_a_known_address_need_no_file(job_file: Path) -> None:
    job = load(JobConfig, job_file, [*ON_RAY])
    assert job.orchestrator.inference.urls == ["http://127.0.0.1:8000"]
    ServersFile(job).write(State.RUNNING, [WorkerView("inference_0", State.READY, 0.0, None, "", node="10.0.0.1-a")])
    assert not job.output_dir.exists()
