"""Whatever is heard, of whomever and when, phases, places and stages go on by their tables; and nothing in these is idle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, get_args

import pytest

from counterpoint.cluster.manager.events import (
    Allocate,
    Allocated,
    AllocationFailed,
    Begin,
    CheckChildren,
    ChildrenChecked,
    Create,
    Created,
    CreateFailed,
    EndAnnounced,
    Event,
    ExtensionRequested,
    Failover,
    FailoverDone,
    GuestsChanged,
    MasterChanged,
    NodeLost,
    Release,
    ReplaceRequested,
    ScaleRequested,
    Start,
    StopRequested,
    Tick,
    WorkerExited,
    WorkerHeard,
    WorkerReady,
    WorkerSilent,
    WorkerStarted,
    WorkerSuspected,
    WorkFinished,
)
from counterpoint.cluster.manager.manager import OF_A_WORKER, OF_THE_JOB, PrimeManager
from counterpoint.cluster.manager.state import PLACES, STAGES, TRANSITIONS, Ledger, Phase
from counterpoint.cluster.spec import JobSpec, RestartScope, StartGate
from tests.cluster.manager.driver import Driver, command, role
from tests.cluster.manager.test_any_order import SPECS

CODES = (0, 0, 1, 2, 137, 143)

ELASTIC = {"count": 2, "min_count": 1, "max_count": 3}
JOBS = (
    *SPECS,
    JobSpec(name="job", roles=(command("side", essential=False, **ELASTIC), role("rank", task=True, **ELASTIC))),
    JobSpec(
        name="job", roles=(role("rank", restart=RestartScope.ROLE, **ELASTIC), command("task", task=True, **ELASTIC))
    ),
    JobSpec(
        name="job", roles=(role("rank", restart=RestartScope.JOB, start=StartGate.WORKER), role("task", task=True))
    ),
)
WALKS = 1000


def test_every_event_has_somebody_who_decides() -> None:
    assert {*OF_A_WORKER, *OF_THE_JOB, MasterChanged} == set(get_args(Event))


def answer(manager: PrimeManager, chance: random.Random, now: float) -> Event:
    """The answer to an instruction, or what a worker does next by itself."""
    asked: list[Any] = [each for each in manager.outstanding() if not isinstance(each, Release)]
    asked += [one for one in manager.state.workers.values() if one.phase in (Phase.INITIALIZING, Phase.RUNNING)]
    match chance.choice(asked or [None]):
        case None:
            return Tick(now if manager.deadline is None else manager.deadline)
        case Allocate(bundle, attempt):
            return Allocated(bundle, attempt, chance.choice(("here", "there")), now)
        case Create(worker, incarnation):
            return Created(worker, incarnation, "here", 7, now)
        case CheckChildren(worker, incarnation, check):
            return ChildrenChecked(worker, incarnation, check, now)
        case Start(worker, incarnation):
            return WorkerStarted(worker, incarnation, now)
        case Failover(worker, incarnation, notice):
            return FailoverDone(worker, incarnation, notice, now)
        case record if getattr(record, "phase", None) is Phase.INITIALIZING:
            return WorkerReady(record.name, record.incarnation, "ipc://it", "", now)
        case record if getattr(record, "phase", None) is Phase.RUNNING:
            return WorkFinished(record.name, record.incarnation, now)
        case instruction:
            return WorkerExited(instruction.worker, instruction.incarnation, chance.choice(CODES), "", now)


def anything(manager: PrimeManager, chance: random.Random, now: float) -> Event:
    """An event of any kind, of any worker, bundle or node; mostly of its incarnation or attempt of now."""
    state, off = manager.state, chance.choice((0, 0, 0, 0, 0, -1, 1))
    worker, other = (chance.choice([*state.workers.values()]) for _ in range(2))
    bundle = chance.choice([*state.bundles.values()])
    one = (worker.name, worker.incarnation + off)
    often: tuple[Callable[[], Event], ...] = (
        lambda: CreateFailed(*one, "no memory", now),
        lambda: ScaleRequested(worker.role, chance.randrange(1, 4), now),
        lambda: Tick(manager.deadline or now),
    )
    kinds: tuple[Callable[[], Event], ...] = (
        *often,
        *often,
        lambda: Begin(now),
        lambda: MasterChanged(state.epoch + chance.randrange(2), now),
        lambda: Allocated(bundle.name, bundle.attempt + off, "here", now),
        lambda: AllocationFailed(bundle.name, bundle.attempt + off, "no room", chance.random() < 0.5, now),
        lambda: Created(*one, "there", 8, now),
        lambda: WorkerReady(*one, "ipc://it", "", now),
        lambda: WorkerStarted(*one, now),
        lambda: WorkFinished(*one, now),
        lambda: EndAnnounced(*one, now),
        lambda: ExtensionRequested(*one, chance.choice((20.0, float("inf"))), now),
        lambda: WorkerExited(*one, chance.choice(CODES), "", now, chance.random() < 0.3),
        lambda: WorkerSuspected(*one, 4.0, now),
        lambda: WorkerHeard(*one, now),
        lambda: WorkerSilent(*one, 15.0, now),
        lambda: ChildrenChecked(*one, state.roles[worker.role].check, now),
        lambda: FailoverDone(*one, worker.notice, now),
        lambda: ReplaceRequested(other.name, other.incarnation, *one, "slow", now),
        lambda: NodeLost(chance.choice(("here", "there")), "gone", now),
        lambda: StopRequested("asked", 143, chance.choice(("", other.name)), now + 2.0),
        lambda: GuestsChanged(chance.choice(((), ("visitor",))), now),
        lambda: Tick(now),
        *often,
    )
    return chance.choice(kinds)()


def rare_steps() -> None:
    """Those that the walks may miss."""
    held, unkillable, given_up = (
        Driver(role("rank", restart=RestartScope.ROLE, **ELASTIC)).running() for _ in range(3)
    )
    for job in (held, unkillable, given_up):
        job.exit("rank-1", 1)
    held.scale("rank", 1)
    unkillable.tick()
    unkillable.tick()
    given_up.stop()
    replaced = Driver(role("rank", **ELASTIC)).running()
    replaced.silent("rank-1")
    replaced.scale("rank", 1)
    replaced.exit("rank-1", 137)
    followed = Driver(role("first"), role("then", after=("first",)))
    followed.begin(0.0)
    followed.ready("first-0")
    followed.ready("then-0")
    followed.stop()
    followed.exit("first-0")
    finished = Driver(role("rank", task=True, **ELASTIC)).running()
    finished.finished("rank-1")
    finished.scale("rank", 1)
    finished.no_start("rank-1", "reported late")
    stuck = Driver(role("rank")).running()
    stuck.silent("rank-0")
    stuck.stop(at=5.0)
    stuck.stop(at=10.0)
    found = Driver(role("rank"), answers=False)
    found.begin(0.0)
    found.no_place("rank-0")
    found.place("rank-0")


@pytest.mark.slow
def test_only_what_the_tables_have_happens_and_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `set_...` of the ledger asserts that its table has the step; here, that walks take every step."""
    tables: tuple[dict[Any, frozenset[Any]], ...] = (TRANSITIONS, PLACES, STAGES)
    left = {(step, other) for table in tables for step in table for other in table[step]}

    def watch(name: str, before: Callable[..., Any]) -> None:
        change = getattr(Ledger, name)

        def watched(ledger: Ledger, *arguments: Any, **options: Any) -> None:
            left.discard((before(ledger, *arguments), arguments[-1] if name == "set_stage" else arguments[1]))
            change(ledger, *arguments, **options)

        monkeypatch.setattr(Ledger, name, watched)

    watch("set_phase", lambda _, worker, *rest: worker.phase)
    watch("set_place", lambda _, bundle, *rest: bundle.place)
    watch("set_stage", lambda ledger, _: ledger.state.stage)
    rare_steps()
    for seed in range(WALKS):
        chance, now = random.Random(seed), 0.0
        manager = PrimeManager(chance.choice(JOBS))
        manager.handle(Begin(0.0))
        for _ in range(100):
            now += chance.choice((0.0, 0.0, 1.0, 30.0))
            manager.handle((anything if chance.random() < 0.35 else answer)(manager, chance, now))
    assert not left, left
