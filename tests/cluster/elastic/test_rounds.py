"""The rounds of elastic training with workers of the test's own, on an event loop whose time passes at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.cluster.elastic.config import ElasticConfig
from counterpoint.cluster.elastic.crew import Activity, Crew, Report, WorkerId
from counterpoint.cluster.elastic.rounds import (
    HEALTHY_SECONDS,
    LOOK_SECONDS,
    MOST_CHECK_FAILURES,
    ElasticTrainingFailed,
    Rounds,
    RoundsStage,
)
from counterpoint.cluster.errors import ActorDied, CallTimeout, RemoteError

IDLE = Report(Activity.IDLE)


class AtOnce(selectors.DefaultSelector):
    """Lets time pass as soon as nobody has anything to do until then."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        assert found or timeout is not None, "everybody waits for ever"
        self.now += 0.0 if found else timeout or 0.0
        return found


def run(story: Coroutine[Any, Any, None]) -> None:
    selector = AtOnce()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.get_loop().time = lambda: selector.now  # type: ignore[method-assign]
        runner.run(story)


@dataclass
class Node:
    """One life of a worker."""

    id: WorkerId
    report: Report = IDLE
    dead: bool = False


@dataclass
class World(Crew):
    """Workers that obey at once, as far as the test does not say otherwise; the dead come again after a while."""

    fewest: int = 2
    most: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    """Names of workers whose nodes are bad."""
    deaf: set[str] = field(default_factory=set)
    """Names of workers that do not end their ranks."""
    mute: set[WorkerId] = field(default_factory=set)
    """Workers that live and answer nothing."""
    rates: dict[str, float] = field(default_factory=dict)
    rebirth_seconds: float = 5.0
    nodes: dict[str, Node] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    unborn: int = 0
    replaced: list[tuple[WorkerId, str]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    started: list[tuple[int, tuple[WorkerId, ...]]] = field(default_factory=list)
    role: str = "trainer"

    def __post_init__(self) -> None:
        values = {"module": "train", "min_workers": self.fewest, "max_workers": self.most, "settle_seconds": 2.0}
        self.config = ElasticConfig.model_validate(values | self.options)
        self.rounds = Rounds(self, self.config, self.most)

    def up(self, *ranks: int) -> World:
        for rank in ranks:
            name = f"trainer-{rank}"
            incarnation = self.nodes[name].id.incarnation + 1 if name in self.nodes else 1
            self.nodes[name] = Node(WorkerId(name, incarnation))
        return self

    def down(self, name: str, comes_again: bool = True) -> None:
        """A worker dies, with its ranks."""
        self.nodes[name].dead = True
        if comes_again:
            self.unborn += 1
            asyncio.get_running_loop().call_later(self.rebirth_seconds, self._bear, name)

    def _bear(self, name: str) -> None:
        self.unborn -= 1
        self.up(int(name.rpartition("-")[2]))

    def says(self, name: str, activity: Activity, reason: str = "") -> None:
        """Its ranks do something by themselves."""
        node = self.nodes[name]
        if node.report.activity.has_ranks:
            node.report = Report(activity, node.report.round, node.report.members, reason)

    def of(self, worker: WorkerId) -> Node | None:
        node = self.nodes.get(worker.name)
        return None if node is None or node.dead or node.id != worker else node

    # --- as of Crew ---

    def living(self) -> dict[str, WorkerId]:
        return {name: node.id for name, node in sorted(self.nodes.items()) if not node.dead and name not in self.done}

    @property
    def expected(self) -> int:
        return len(self.living()) + self.unborn

    @property
    def finished(self) -> set[str]:
        return self.done

    def replace(self, worker: WorkerId, reason: str) -> None:
        if self.of(worker) is not None:
            self.replaced.append((worker, reason))
            self.down(worker.name)

    async def call(self, worker: WorkerId, method: str, *arguments: Any, seconds: float = 1.0) -> Any:
        self.calls.append((method, worker.name))
        node = self.of(worker)
        if node is None or worker in self.mute:
            raise ActorDied(f"{worker} died")
        match method, arguments:
            case "report", (known, patience):
                while node.report.state == known and patience > 0 and not node.dead:
                    patience -= LOOK_SECONDS
                    await asyncio.sleep(LOOK_SECONDS)
                answer: Any = msgspec.to_builtins(node.report)
            case "start_elastic_job", (number, members, *_):
                ids = tuple(WorkerId(*member) for member in members)
                ranks = [each for each in self.nodes.values() if not each.dead and each.report.activity.has_ranks]
                assert all(each.report.round == number for each in ranks), "ranks of an earlier round still run"
                assert self.fewest <= len(ids) <= self.most
                if worker == ids[0]:
                    self.started.append((number, ids))
                node.report = Report(Activity.TRAINING, number, ids)
                answer = ["host", 1]
            case "stop_round", _:
                if worker.name in self.deaf:
                    await asyncio.sleep(seconds)
                    raise CallTimeout(f"{worker} does not end its ranks")
                await asyncio.sleep(1.0)
                node.report = Report(Activity.IDLE, node.report.round, node.report.members)
                answer = None
            case "do_node_check", _:
                await asyncio.sleep(1.0)
                answer = {"compute": self.rates.get(worker.name, 1.0)}
            case "open_pair", _:
                answer = [worker.name, 1]
            case "check_pair", (host, *_):
                await asyncio.sleep(1.0)
                if {worker.name, host} & self.bad:
                    raise RemoteError("no route")
                answer = 1.0
            case _:
                raise AssertionError(method)
        if node.dead:
            raise ActorDied(f"{worker} died")
        return answer


async def until(condition: Callable[[], object], seconds: float = 2000.0) -> None:
    for _ in range(int(seconds / LOOK_SECONDS)):
        if condition():
            return
        await asyncio.sleep(LOOK_SECONDS)
    raise AssertionError("it does not happen")


async def training(world: World, number: int) -> None:
    """Waits until the ranks of that round run."""
    await until(lambda: (world.rounds.stage, world.rounds.round) == (RoundsStage.TRAINING, number))


def played(world: World, script: Callable[[World], Coroutine[Any, Any, None]], succeeds: bool = True) -> World:
    """Trains while the script runs; then, unless the training has ended, all ranks succeed."""

    async def story() -> None:
        task = asyncio.create_task(world.rounds.train())
        try:
            await script(world)
            if succeeds:
                for name in world.nodes:
                    world.says(name, Activity.SUCCEEDED)
            await asyncio.wait_for(task, 10_000)
            assert world.rounds.stage is RoundsStage.ENDED
        finally:
            task.cancel()

    run(story())
    return world


def members(world: World) -> list[str]:
    return [f"{member.name[-1]}.{member.incarnation}" for member in world.rounds.members]


def test_workers_are_checked_and_trained_to_the_end() -> None:
    async def script(world: World) -> None:
        await training(world, 1)
        world.says("trainer-0", Activity.SUCCEEDED)
        await asyncio.sleep(1.0)
        world.down("trainer-0")  # its part is complete
        await asyncio.sleep(30.0)

    world = played(World().up(0, 1, 2), script)
    assert members(world) == ["0.1", "1.1", "2.1"]
    assert len([method for method, _ in world.calls if method == "do_node_check"]) == 3
    assert len([method for method, _ in world.calls if method == "open_pair"]) == 3


def test_enough_workers_wait_for_the_others_only_so_long() -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(world.config.join_seconds - 1.0)
        assert world.rounds.stage is RoundsStage.GATHERING
        await training(world, 1)

    assert members(played(World(unborn=1).up(0, 2), script)) == ["0.1", "2.1"]


def test_too_few_workers_wait_long_and_fail() -> None:
    with pytest.raises(ElasticTrainingFailed, match="only 1 of at least 2"):
        played(World(unborn=1).up(0), lambda world: asyncio.sleep(0), succeeds=False)


def test_the_bad_node_alone_is_started_again_and_finally_set_aside() -> None:
    world = played(World(bad={"trainer-1"}).up(0, 1, 2), lambda world: training(world, 1))
    assert [worker for worker, _ in world.replaced] == [WorkerId("trainer-1", 1), WorkerId("trainer-1", 2)]
    assert "the other one is good" in world.replaced[0][1]
    assert list(world.rounds.set_aside) == ["trainer-1"]
    assert members(world) == ["0.1", "2.1"]


def test_a_node_that_is_good_again_takes_part() -> None:
    async def script(world: World) -> None:
        await until(lambda: world.replaced)
        world.bad.clear()
        await training(world, 1)

    assert members(played(World(bad={"trainer-1"}).up(0, 1, 2), script)) == ["0.1", "1.2", "2.1"]


def test_a_check_returns_once_a_child_is_to_be_created_again_and_is_not_repeated_for_those_that_passed() -> None:
    world = World(bad={"trainer-1"}).up(0, 1, 2)

    async def story() -> None:
        await world.rounds.prepare([*world.living().values()])
        assert [worker.name for worker, _ in world.replaced] == ["trainer-1"]
        world.bad.clear()
        await until(lambda: len(world.living()) == 3)
        for _ in range(2):
            await world.rounds.prepare([*world.living().values()])
            assert world.rounds.stage is RoundsStage.READY
        assert world.calls.count(("do_node_check", "trainer-1")) == 2
        world.down("trainer-0")
        await until(lambda: len(world.living()) == 3)
        await world.rounds.prepare([*world.living().values()])
        assert ("do_node_check", "trainer-0") in world.calls[-15:]
        assert members(world) == ["0.2", "1.2", "2.1"]

    run(story())


def test_nodes_that_nobody_can_tell_apart_are_all_started_again() -> None:
    world = World(most=2, bad={"trainer-0"}).up(0, 1)
    with pytest.raises(ElasticTrainingFailed, match=r"0 of at least 2 .* set aside"):
        played(world, lambda world: asyncio.sleep(0), succeeds=False)
    assert {worker.name for worker, _ in world.replaced} == {"trainer-0", "trainer-1"}
    assert len(world.replaced) == 2 * (MOST_CHECK_FAILURES - 1)


@pytest.mark.parametrize("after", [0.5, 1.5])
def test_who_dies_during_the_check_is_awaited_and_blames_nobody(after: float) -> None:
    async def script(world: World) -> None:
        await asyncio.sleep(after)
        assert world.rounds.stage is RoundsStage.CHECKING
        world.down("trainer-1")
        await training(world, 1)

    world = played(World().up(0, 1), script)
    assert members(world) == ["0.1", "1.2"]
    assert not world.replaced


def test_who_lives_and_does_not_answer_is_replaced() -> None:
    world = played(World(mute={WorkerId("trainer-1", 1)}).up(0, 1), lambda world: training(world, 1))
    assert [worker for worker, _ in world.replaced] == [WorkerId("trainer-1", 1)]
    assert members(world) == ["0.1", "1.2"]


@pytest.mark.parametrize("end", [None, Activity.FAILED, Activity.IDLE])
def test_a_death_or_failure_stops_all_and_begins_the_next_round(end: Activity | None) -> None:
    async def script(world: World) -> None:
        await training(world, 1)
        world.calls.clear()
        if end is None:
            world.down("trainer-1")
        else:
            world.says("trainer-1", end, "exit code 1")
        await training(world, 2)

    world = played(World().up(0, 1, 2), script)
    assert members(world) == ["0.1", "1.2" if end is None else "1.1", "2.1"]
    assert world.calls.index(("stop_round", "trainer-0")) < world.calls.index(("do_node_check", "trainer-1"))


def test_a_failing_script_is_started_again_within_its_budget() -> None:
    async def fail_at(world: World, seconds: float) -> None:
        number = world.rounds.round + 1
        await training(world, number)
        await asyncio.sleep(seconds)
        world.says("trainer-1", Activity.FAILED, "exit code 3")
        await until(lambda: world.rounds.stage is not RoundsStage.TRAINING)

    async def script(world: World) -> None:
        for _ in range(5):
            await fail_at(world, HEALTHY_SECONDS + 1.0)
        for _ in range(5):  # what a death does to the others is no fault of the script
            await training(world, world.rounds.round + 1)
            world.down("trainer-2")
            world.says("trainer-1", Activity.FAILED, "connection reset")
            await until(lambda: world.rounds.stage is not RoundsStage.TRAINING)
        await fail_at(world, 1.0)
        await fail_at(world, 1.0)

    world = World(options={"max_restarts": 2}).up(0, 1, 2)
    with pytest.raises(ElasticTrainingFailed, match="3 rounds failed in a row, the last on trainer-1: exit code 3"):
        played(world, script, succeeds=False)
    assert world.rounds.round == 12


def test_a_newcomer_ends_the_round_once_others_had_time_to_come_too() -> None:
    async def script(world: World) -> None:
        await training(world, 1)
        world.up(2)
        await asyncio.sleep(world.config.settle_seconds - 1.0)
        assert world.rounds.stage is RoundsStage.TRAINING
        await training(world, 2)
        world.up(3)  # a spare
        await asyncio.sleep(60.0)
        assert world.rounds.round == 2

    assert members(played(World().up(0, 1), script)) == ["0.1", "1.1", "2.1"]


def test_a_newcomer_does_not_disturb_a_training_that_ends() -> None:
    async def script(world: World) -> None:
        await training(world, 1)
        world.says("trainer-0", Activity.SUCCEEDED)
        await asyncio.sleep(10.0)
        world.up(2)
        await asyncio.sleep(60.0)

    assert played(World().up(0, 1), script).rounds.round == 1


def test_who_does_not_end_its_ranks_in_time_is_replaced() -> None:
    async def script(world: World) -> None:
        await training(world, 1)
        world.deaf.add("trainer-2")
        world.down("trainer-1")
        await training(world, 2)

    world = played(World().up(0, 1, 2), script)
    assert [worker for worker, _ in world.replaced] == [WorkerId("trainer-2", 1)]
    assert members(world) == ["0.1", "1.2", "2.2"]


IDS = tuple(WorkerId(f"trainer-{rank}", 1) for rank in range(3))


def found(activities: dict[int, Activity], done: tuple[int, ...] = ()) -> World:
    """A world whose workers are in round 4 when the SubMaster begins."""
    world = World(done={f"trainer-{rank}" for rank in done}).up(*activities)
    for rank, activity in activities.items():
        world.nodes[f"trainer-{rank}"].report = Report(activity, 4, IDS)
    return world


@pytest.mark.parametrize(
    ("activities", "done", "number"),
    [
        (dict.fromkeys(range(3), Activity.TRAINING), (), 4),
        ({0: Activity.SUCCEEDED, 1: Activity.TRAINING}, (2,), 4),
        (dict.fromkeys(range(2), Activity.TRAINING), (), 5),
        ({0: Activity.TRAINING, 1: Activity.TRAINING, 2: Activity.IDLE}, (), 5),
        ({0: Activity.TRAINING, 1: Activity.TRAINING, 2: Activity.FAILED}, (), 5),
        (dict.fromkeys(range(3), Activity.IDLE), (), 5),
    ],
)
def test_a_new_sub_master_takes_over_a_whole_round_and_ends_a_broken_one(
    activities: dict[int, Activity], done: tuple[int, ...], number: int
) -> None:
    world = played(found(activities, done), lambda world: training(world, number))
    assert world.rounds.round == number
    assert len(world.started) == number - 4


def test_a_new_sub_master_finds_the_training_complete() -> None:
    assert played(found({}, (0, 1, 2)), lambda world: asyncio.sleep(0)).rounds.round == 0


def test_stragglers_are_named() -> None:
    world = World(rates={"trainer-0": 9.0, "trainer-1": 10.0}).up(0, 1, 2)
    played(world, lambda world: training(world, 1))
    assert world.rounds.stragglers == ["trainer-2 is a straggler: its compute rate is 11% of the median"]
    assert members(world) == ["0.1", "1.1", "2.1"]


EVENTS = ["kill", "fail", "idle", "bad", "good", "deaf", "wait"]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from(EVENTS), st.integers(0, 3), st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.0])), max_size=25
    ),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_members_live_and_no_two_rounds_overlap(
    events: list[tuple[str, int, float]], fewest: int, check: bool
) -> None:
    """Deaths, failures, slow ends and bad nodes at any time; then peace, in which the training must end."""

    async def script(world: World) -> None:
        for what, rank, pause in events:
            name = f"trainer-{rank}"
            match what:
                case "kill" if name in world.living():
                    world.down(name)
                case "fail":
                    world.says(name, Activity.FAILED, "exit code 1")
                case "idle":
                    world.says(name, Activity.IDLE)
                case "bad":
                    world.bad.add(name)
                case "good":
                    world.bad.discard(name)
                case "deaf":
                    world.deaf.symmetric_difference_update({name})
            await asyncio.sleep(pause)
        world.bad.clear()
        world.deaf.clear()
        await until(lambda: len(world.living()) == 4)
        await until(lambda: world.rounds.stage is RoundsStage.TRAINING and len(world.rounds.members) >= fewest)
        await asyncio.sleep(10.0)
        assert world.rounds.stage is RoundsStage.TRAINING
        assert all(world.of(member) is not None for member in world.rounds.members)
        assert [number for number, _ in world.started] == sorted({number for number, _ in world.started})

    options = {"max_restarts": 10**6, "check": check}
    world = World(fewest, 4, options=options, rebirth_seconds=3.0).up(0, 1, 2, 3)
    try:
        played(world, script)
    except ElasticTrainingFailed:
        assert len(world.rounds.set_aside) > 4 - fewest
