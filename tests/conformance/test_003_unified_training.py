"""Document 003, unified training: its names, its lifecycle, and its driving patterns as jobs whose workers are killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster import (
    Backend,
    ElasticMaster,
    ElasticWorker,
    JobBuilder,
    JobFailed,
    JobSpec,
    PrimeManager,
    PrimeMaster,
    Scheduler,
    Stage,
    Worker,
    WorkLoad,
)
from counterpoint.cluster.manager.events import (
    Allocate,
    Allocated,
    Create,
    Created,
    Event,
    ManagerStage,
    Start,
    StopWorker,
    WorkerReady,
    WorkerStarted,
)
from counterpoint.cluster.manager.state import PlacementState
from counterpoint.cluster.master.faults import Faults
from counterpoint.cluster.master.orders import Orders
from tests.cluster.master.fake_backend import FakeBackend, World
from tests.conformance import work_loads
from tests.support.job_workers import send
from tests.support.polling import wait_until

HERE = "tests.conformance.work_loads"


def spec(**roles: dict[str, Any]) -> JobSpec:
    """A job of these roles, whose workers are classes of `work_loads`."""
    builder = JobBuilder("unified")
    for name, given in roles.items():
        values = {"silence_timeout_seconds": 60.0} | given
        builder = builder.role(name, worker=f"{HERE}:{values.pop('worker')}", **values)
    return builder.build()


# --- the PrimeManager and the Scheduler ---


def test_the_manager_prepares_starts_monitors_and_stops() -> None:
    manager = PrimeManager(spec(trainer={"worker": "Counted", "task": True, "count": 2}))
    stages = [manager.stage]
    allocate = manager.prepare()
    assert [type(each) for each in allocate] == [Allocate, Allocate]
    assert manager.prepare() == []
    with pytest.raises(ValueError, match="trainer not ready"):
        manager.start()
    created = [
        instruction for each in allocate if isinstance(each, Allocate)
        for instruction in manager.handle(Allocated(each.bundle, each.attempt, "node", 1.0))
    ]  # fmt: skip
    assert [(type(each), each.worker) for each in created if isinstance(each, Create)] == [
        (Create, "trainer-0"), (Create, "trainer-1"),
    ]  # fmt: skip
    for rank in (0, 1):
        manager.handle(Created(f"trainer-{rank}", 1, "node", 7 + rank, 2.0))
        manager.handle(WorkerReady(f"trainer-{rank}", 1, "", "", 3.0))
    stages.append(manager.stage)
    assert manager.start() == [Start("trainer-0", 1), Start("trainer-1", 1)]
    for rank in (0, 1):
        manager.handle(WorkerStarted(f"trainer-{rank}", 1, 4.0))
    stages.append(manager.stage)
    assert manager.start() == []
    assert manager.monitor(5.0) == []
    assert {(type(each), getattr(each, "worker", "")) for each in manager.stop(6.0)} == {
        (StopWorker, "trainer-0"), (StopWorker, "trainer-1"),
    }  # fmt: skip
    stages.append(manager.stage)
    assert stages == [ManagerStage.INIT, ManagerStage.READY, ManagerStage.RUNNING, ManagerStage.STOPPING]
    assert manager.monitor(1000.0) != [], "who does not stop in time is killed"


async def test_the_scheduler_allocates_creates_and_cleans_up(tmp_path: Path) -> None:
    """Over a backend in memory, whose worlds are those of `tests/cluster/master`."""
    job, world, emitted = spec(trainer={"worker": "Counted", "task": True, "count": 3}), World(), list[Event]()
    manager = PrimeManager(job)
    backend: Backend = FakeBackend(world, 1)

    def report(error: Exception) -> None:
        raise error

    scheduler = Scheduler(Orders(job, tmp_path), backend, manager, emitted.append, report, Faults(""))
    for each in manager.prepare():
        assert isinstance(each, Allocate)
        await scheduler.allocate_placement_group(each)
    assert world.bundles == {"trainer-0", "trainer-1", "trainer-2"}
    creations = [each for event in emitted for each in manager.handle(event) if isinstance(each, Create)]
    await scheduler.create_actors(creations[:2])
    await scheduler.create_nodes(creations[2:])
    assert world.created == [("trainer-0", 1), ("trainer-1", 1), ("trainer-2", 1)]
    await scheduler.cleanup()
    assert world.bundles != set(), "the job has not ended: another master goes on with it"
    manager.stop(1.0)
    for worker in [*world.workers]:
        world.end(worker, 0)
        manager.handle(world.reports[-1])
    assert manager.stage is ManagerStage.STOPPED
    manager.state.bundles["trainer-1"].place = PlacementState.ALLOCATED  # as where its worker could not be killed
    await scheduler.cleanup()
    assert "release trainer-1" in world.commands


# --- the lifecycle of a job and its workers ---


def lines_of(directory: Path, name: str) -> list[str]:
    """What the workers of `work_loads` noted."""
    file = directory / name
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.slow
def test_a_job_is_created_started_watched_and_stopped(tmp_path: Path) -> None:
    master = PrimeMaster.create(
        spec(
            helper={"worker": "Counted", "count": 2, "sub_master": f"{HERE}:Watcher"},
            trainer={"worker": "Asker", "task": True, "after": ("helper",)},
        ),
        tmp_path / "job",
        standby=False,
    )
    assert not (tmp_path / "job" / "logs").exists(), "nothing runs before it is started"
    try:
        assert master.start(120).stage == ManagerStage.RUNNING
        nodes = master.get_nodes_by_role("helper")
        assert [(node.worker, node.stage) for node in nodes] == [
            ("helper-master", "RUNNING"), ("helper-0", "RUNNING"), ("helper-1", "RUNNING"),
        ]  # fmt: skip
        wait_until(lambda: lines_of(tmp_path / "job", "trainer-0") != [], "the trainer's question")
    finally:
        master.stop()
    with pytest.raises(JobFailed) as ended:
        master.wait(120)
    assert ended.value.code != 0
    assert master.status().stage == ManagerStage.STOPPED
    assert lines_of(tmp_path / "job", "helper-0") == ["__init__", "setup", "self_check", "start", "stop"]
    assert lines_of(tmp_path / "job", "helper-master")[:2] == ["check_child helper-0 helper-1", "start"]
    assert lines_of(tmp_path / "job", "trainer-0")[:1] == ["helper-0 READY, helper-1 READY"]


@pytest.mark.slow
def test_a_worker_that_is_not_fit_fails_before_it_is_ready(tmp_path: Path) -> None:
    master = PrimeMaster.create(
        spec(trainer={"worker": "Unfit", "task": True, "max_restarts": 0}), tmp_path / "job", standby=False
    )
    with pytest.raises(JobFailed, match="this node is too slow"):
        master.start(120)
    (trainer,) = master.get_nodes_by_role("trainer")
    assert trainer.stage == Stage.FAILED


def test_a_work_load_is_a_worker_with_every_hook() -> None:
    assert WorkLoad is Worker
    for hook in ("setup", "self_check", "status", "start", "stop"):
        assert callable(getattr(WorkLoad, hook))
    assert callable(work_loads.Watcher.check_child)


# --- driving pattern: workers run their own loops ---


def faulty_loops() -> JobSpec:
    """Source -> Tokenizer -> DataChannel -> Sampler -> DataChannel -> Trainer."""
    lines, tokens, samples = (
        {"name": name, "producers": [f"{producer}-0"], "capacity": 32}
        for name, producer in (("lines", "source"), ("tokens", "tokenizer"), ("samples", "sampler"))
    )
    channels = [{**each, "directory": f"journal/{each['name']}"} for each in (lines, tokens, samples)]
    builder = JobBuilder("loops").role(
        "host", worker="counterpoint.cluster:HostWorker", config={"channels": channels}, silence_timeout_seconds=60.0
    )
    for name, worker, config in (
        ("trainer", "Drop", {"input": samples}),
        ("sampler", "Faulty", {"input": tokens, "output": samples}),
        ("tokenizer", "Upper", {"input": lines, "output": tokens}),
        ("source", "Count", {"output": lines}),
    ):
        builder = builder.role(
            name, worker=f"{HERE}:{worker}", config=config, silence_timeout_seconds=60.0, task=True, max_restarts=0
        )
    return builder.build()


@pytest.mark.slow
def test_a_loop_that_dies_for_good_ends_its_pipeline(tmp_path: Path) -> None:
    master = PrimeMaster.create(faulty_loops(), tmp_path / "job", standby=False)
    master.start_master()
    with pytest.raises(JobFailed, match=r"sampler-0 ended .*`start` raised ValueError: no sample of line 0"):
        master.wait(240)


# --- driving pattern: a SubMaster drives its workers ---


def test_the_elastic_backend_has_the_documents_names() -> None:
    for name in ("check_workers", "do_node_check", "start_elastic_job", "rendezvous", "check_child", "status", "start"):
        assert callable(getattr(ElasticMaster, name))
    for name in ("do_node_check", "start_elastic_job"):
        assert callable(getattr(ElasticWorker, name))


SCRIPT = Path(__file__).parents[2] / "examples" / "elastic_training" / "train.py"


def elastic(training: Path, scaling: dict[str, Any]) -> JobSpec:
    """The example of elastic training on one or two workers, and a role that asks where the ranks meet."""
    config = {
        "script": str(SCRIPT), "arguments": [str(training), "--steps", "300", "--step-seconds", "0.5"], "check": False,
        "min_workers": 1, "max_workers": 2, "settle_seconds": 0.5, "scaling": scaling, "join_seconds": 120,
    }  # fmt: skip
    return (
        JobBuilder("elastic")
        .role(
            "trainer", worker="counterpoint.cluster:ElasticWorker", task=True, count=1, max_count=2,
            sub_master="counterpoint.cluster:ElasticMaster", config=config, max_restarts=20,
            silence_timeout_seconds=60.0,
        )
        .role("guest", worker=f"{HERE}:Visitor", silence_timeout_seconds=60.0)
        .build()
    )  # fmt: skip


def status_of(master: PrimeMaster, worker: str) -> str:
    """The line that a worker says of itself."""
    return next((each.status for each in master.status().workers if each.worker == worker), "")


@pytest.mark.slow
def test_the_progress_of_the_training_scales_it_and_a_killed_worker_costs_nothing(tmp_path: Path) -> None:
    training = tmp_path / "training"
    scaling = {"policy": "throughput", "target": 1000.0, "window_seconds": 2.0}
    master = PrimeMaster.create(elastic(training, scaling), tmp_path / "job", standby=False)

    def ranks() -> list[int]:
        return [json.loads(line)["ranks"] for line in lines_of(training, "progress.jsonl")]

    try:
        master.start(240)
        wait_until(lambda: 2 in ranks(), "a step of two workers", seconds=240)
        assert ranks()[0] == 1
        assert "scaling: 1 -> 2 workers" in master.logs("trainer-master", 1000)
        wait_until(
            lambda: "scaling: 2 -> 2 workers" in status_of(master, "trainer-master"), "the next decision", seconds=120
        )
        wait_until(
            lambda: any(len(json.loads(line)["members"]) == 2 for line in lines_of(tmp_path / "job", "guest-0")),
            "the rendezvous of two workers",
            seconds=120,
        )
        before = len(ranks())
        send(master, "trainer-0", signal.SIGKILL)
        wait_until(lambda: 2 in ranks()[before + 2 :], "a step of two workers after a death", seconds=240)
        (training / "hurry").touch()
        assert master.wait(240).code == 0
    finally:
        master.stop()
    steps = [json.loads(line)["step"] for line in lines_of(training, "progress.jsonl")]
    assert steps == list(range(1, 301))
