"""The loop against a backend in memory: whole jobs, and the death of the master at every point of each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.backends import actor_link, kept, on_ray
from counterpoint.cluster.backends.base import Backend
from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.state import CREATIONS_AT_ONCE
from counterpoint.cluster.master import scheduler
from counterpoint.cluster.master.faults import POINTS, Faults
from counterpoint.cluster.master.orders import Orders
from counterpoint.cluster.master.prime_master import MasterTerm, fitting
from counterpoint.cluster.master.state_writer import StateWriter, open_state
from counterpoint.cluster.spec import JobSpec, RoleSpec
from counterpoint.cluster.state_file import read_state
from tests.cluster.master.fake_backend import FakeBackend, World

DEADLINE = 60.0


class Killed(BaseException):
    """Stands for a SIGKILL."""


class FatalFaults(Faults):
    """Ends the master as if killed: nothing that it would still do is done."""

    dead = False

    def reach(self, point: str) -> None:
        if self.dead:
            raise Killed
        super().reach(point)

    def kill(self) -> None:
        self.dead = True
        raise Killed


def spec(**role: Any) -> JobSpec:
    return JobSpec(
        name="job",
        roles=(
            RoleSpec(name="service", worker="some.module:Service", count=2),
            RoleSpec(name="task", worker="some.module:Task", count=2, task=True, after=("service",), **role),
        ),
    )


class Job:
    """A job, its world, and one master after the other."""

    def __init__(self, directory: Path, job: JobSpec | None = None) -> None:
        self.spec = job or spec()
        self.directory = directory
        self.world = World()

    def master(self, faults: Faults | None = None) -> MasterTerm:
        state = StateWriter(open_state(self.directory, None), faults)
        state.read()
        epoch = state.epoch + 1
        backend: Backend = FakeBackend(self.world, epoch)
        return MasterTerm(Orders(self.spec, self.directory), state, backend, epoch, faults)

    async def run(self, faults: Faults | None = None) -> events.Outcome:
        async with asyncio.timeout(DEADLINE):
            return await self.master(faults).run()

    async def run_to_death(self, faults: FatalFaults) -> events.Outcome | None:
        """Runs a master, and returns None once it was killed."""
        master = self.master(faults)
        run = asyncio.create_task(master.run())
        async with asyncio.timeout(DEADLINE):
            while not faults.dead and not run.done():  # noqa: ASYNC110 - it dies between two turns of the loop
                await asyncio.sleep(0)
            if run.done() and not faults.dead:
                return run.result()
            await killed(run)
        return None

    async def running(self) -> tuple[MasterTerm, asyncio.Task[events.Outcome]]:
        """Starts a master, and returns once the job is RUNNING. Its workers do nothing by themselves."""
        self.world.on_start = lambda world, worker, incarnation: None
        master = self.master()
        run = asyncio.create_task(master.run())
        await until(lambda: master.is_ready and master.manager.stage is events.ManagerStage.RUNNING)
        return master, run


async def killed(run: asyncio.Task[Any]) -> None:
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.005)


def test_a_creation_has_the_time_of_all_that_its_backend_waits_for() -> None:
    """Else a busy machine's worker or actor is given up while its backend still waits for it."""
    ray_seconds = on_ray.PLACE_SECONDS + 2 * on_ray.CALL_SECONDS + actor_link.START_SECONDS
    assert max(kept.PREDECESSOR_SECONDS, ray_seconds) < scheduler.CREATE_SECONDS


@pytest.mark.slow
async def test_many_workers_are_created_few_at_a_time_each_with_the_whole_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "CREATE_SECONDS", 3.0)  # all one after the other take longer
    monkeypatch.setattr(scheduler, "CREATIONS_AT_ONCE", 4)
    create, waiting = FakeBackend.create, [0, 0]
    one_at_a_time = asyncio.Lock()

    async def create_slowly(backend: FakeBackend, order: Any) -> None:
        waiting[0] += 1
        waiting[1] = max(waiting)
        async with one_at_a_time:
            await asyncio.sleep(0.04)
            await create(backend, order)
        waiting[0] -= 1

    monkeypatch.setattr(FakeBackend, "create", create_slowly)
    job = Job(tmp_path, JobSpec(name="job", roles=(RoleSpec(name="task", worker="m:Task", count=100, task=True),)))
    outcome = await job.run()
    assert outcome.code == 0
    assert waiting[1] <= 4
    assert len(job.world.created) == 100


@pytest.mark.slow
async def test_a_stop_does_not_wait_for_creations_that_have_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "CREATE_SECONDS", 1.0)
    begun: list[str] = []

    async def hang(backend: FakeBackend, order: Any) -> None:
        begun.append(order.worker)
        await asyncio.Event().wait()

    monkeypatch.setattr(FakeBackend, "create", hang)
    many = 3 * CREATIONS_AT_ONCE
    master = Job(
        tmp_path, JobSpec(name="job", roles=(RoleSpec(name="task", worker="m:Task", count=many, task=True),))
    ).master()
    running = asyncio.create_task(master.run())
    await until(lambda: begun)
    await master.request(events.JobStopRequested("enough", 143, "", 0.0))
    async with asyncio.timeout(DEADLINE):
        assert (await running).code == 143
    assert len(begun) == CREATIONS_AT_ONCE


LOOP_POINTS = [point for point in POINTS if "outcome" not in point]


@pytest.mark.parametrize("point", LOOP_POINTS)
@pytest.mark.slow
async def test_a_master_that_is_killed_anywhere_costs_nothing(tmp_path: Path, point: str) -> None:
    """At each write and each instruction of a job, before and after: the job ends as it would have."""
    undisturbed = Job(tmp_path / "undisturbed")
    counted = Faults("")
    outcome = await undisturbed.run(counted)
    assert counted.reached[point] > 4
    for number in range(1, counted.reached[point] + 1):
        job = Job(tmp_path / str(number))
        if await job.run_to_death(FatalFaults(f"{point}:{number}")) is not None:
            continue  # Events arrived together this time: it has fewer writes.
        assert await job.run() == outcome, number
        assert sorted(job.world.created) == sorted(undisturbed.world.created), number
        assert job.world.workers == {}


@pytest.mark.slow
async def test_masters_that_are_killed_one_after_the_other_come_to_the_end(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(100):
        if (outcome := await job.run_to_death(FatalFaults("after_write:2"))) is not None:
            break
    assert outcome is not None
    assert outcome.code == 0
    assert len(job.world.created) == 4


async def test_what_died_while_there_was_no_master_is_repaired(tmp_path: Path) -> None:
    job = Job(tmp_path)
    _, run = await job.running()
    await killed(run)
    job.world.workers.pop("service-0")  # nobody saw it die
    job.world.end("task-1", 1)  # its keeper did
    job.world.on_start = lambda world, worker, _: world.finish(worker) if worker.startswith("task") else None
    second = job.master()
    run = asyncio.create_task(second.run())
    await until(lambda: ("task-1", 2) in job.world.created and ("service-0", 2) in job.world.created)
    await until(lambda: "task-0" in job.world.workers)
    job.world.finish("task-0")
    async with asyncio.timeout(DEADLINE):
        assert (await run).code == 0
    assert job.world.ran_twice == []


async def test_a_stray_process_is_killed_at_a_takeover(tmp_path: Path) -> None:
    job = Job(tmp_path)
    _, run = await job.running()
    await killed(run)
    stray = job.world.workers["service-0"]
    job.world.workers["gone-7"] = stray
    run = asyncio.create_task(job.master().run())
    await until(lambda: "kill gone-7 1" in job.world.commands)
    await killed(run)


async def test_a_request_is_durable_when_it_is_answered(tmp_path: Path) -> None:
    job = Job(tmp_path, spec(min_count=1, max_count=5))
    master, run = await job.running()
    await master.request(events.ScaleRequested("task", 3, 0.0))
    await until(lambda: ("task-2", 1) in job.world.created)
    await master.request(events.JobStopRequested("enough", 7, "", 0.0))
    async with asyncio.timeout(DEADLINE):
        outcome = await run
    assert (outcome.code, "enough" in outcome.reason) == (7, True)


async def test_orders_that_fail_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.cluster.master.scheduler.PAUSE_SECONDS", 0.01)
    job = Job(tmp_path)
    job.world.fails = {"create": 1, "start": 2, "publish": 1}
    assert (await job.run()).code == 0


async def test_the_failure_of_the_backend_ends_the_loop_with_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    master, run = await job.running()
    master.fail(RuntimeError("the backend is broken"))
    with pytest.raises(RuntimeError, match="is broken"):
        await asyncio.wait_for(run, DEADLINE)


async def test_the_state_tells_what_has_changed_also_across_masters(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def die_first(world: World, worker: str, incarnation: int) -> None:
        if worker == "task-0" and incarnation == 1:
            world.end(worker, 1, "ValueError: no")
        elif worker.startswith("task"):
            world.finish(worker)

    job.world.on_start = die_first
    while await job.run_to_death(FatalFaults("after_write:4")) is None:
        pass
    saved = read_state(tmp_path)
    assert saved.job.outcome is not None
    told = [(one.worker, one.before, one.after, one.cause) for one in saved.changes]
    assert ("task-0", "running", "restarting", "worker exited") in told
    assert [one.reason for one in saved.changes if one.after == "restarting"] == ["ValueError: no"]
    assert [after for worker, _, after, _ in told if not worker] == ["READY", "RUNNING", "STOPPING", "STOPPED"]
    for worker in saved.job.workers:
        mine = [(before, after) for name, before, after, _ in told if name == worker]
        assert [before for before, _ in mine] == ["waiting", *(after for _, after in mine[:-1])]


def test_a_long_reason_is_cut_and_one_that_is_no_text_is_made_one() -> None:
    event = fitting(events.WorkerExited("a-0", 1, 1, "x" * 5000, 0.0))
    assert isinstance(event, events.WorkerExited)
    assert (len(event.reason), event.reason[-5:]) == (2000, "(cut)")
    event = fitting(events.AllocationFailed("bundle", 1, "no file b\udcff \N{SNOWMAN}", False, 0.0))
    assert event == events.AllocationFailed("bundle", 1, "no file b? \N{SNOWMAN}", False, 0.0)


@pytest.mark.parametrize(
    "event",
    [
        events.WorkerReady("a-0", 2, "x" * 100_000, "", 5.0),
        events.WorkerReady("a-0", 2, "\udcff", "", 5.0),
        *(events.ExtensionRequested("a-0", 2, seconds, 5.0) for seconds in (float("nan"), float("inf"), True, "soon")),  # type: ignore[arg-type]
    ],
)
def test_what_the_state_cannot_hold_counts_against_its_worker(event: events.Event) -> None:
    assert fitting(event) == events.WorkerSilent("a-0", 2, 0.0, 5.0)


@pytest.mark.parametrize(
    "event", [events.GuestsChanged(("x" * 100_000,), 0.0), events.JobStopRequested("x", True, "", 0.0)]
)
def test_what_the_state_cannot_hold_and_is_of_no_worker_is_refused(event: events.Event) -> None:
    with pytest.raises(ValueError, match=type(event).__name__):
        fitting(event)
