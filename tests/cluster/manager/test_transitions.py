"""Whatever is heard, of whomever and when, phases, places and stages go on by their tables; and nothing in these is idle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, get_args

import pytest

from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.manager import OF_A_WORKER, OF_THE_JOB, PrimeManager
from counterpoint.cluster.manager.state import PLACES, STAGES, TRANSITIONS, JobLedger, Phase
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
    assert {*OF_A_WORKER, *OF_THE_JOB, events.MasterChanged} == set(get_args(events.Event))


def answer(manager: PrimeManager, chance: random.Random, now: float) -> events.Event:
    """The answer to an instruction, or what a worker does next by itself."""
    asked: list[Any] = [each for each in manager.outstanding() if not isinstance(each, events.Release)]
    asked += [one for one in manager.state.workers.values() if one.phase in (Phase.INITIALIZING, Phase.RUNNING)]
    match chance.choice(asked or [None]):
        case None:
            return events.Tick(now if manager.deadline is None else manager.deadline)
        case events.Allocate(bundle, attempt):
            return events.Allocated(bundle, attempt, chance.choice(("here", "there")), now)
        case events.Create(worker, incarnation):
            return events.Created(worker, incarnation, "here", 7, now)
        case events.CheckChildren(worker, incarnation, check):
            return events.ChildrenChecked(worker, incarnation, check, now)
        case events.Start(worker, incarnation):
            return events.WorkerStarted(worker, incarnation, now)
        case events.Failover(worker, incarnation, notice):
            return events.FailoverDone(worker, incarnation, notice, now)
        case record if getattr(record, "phase", None) is Phase.INITIALIZING:
            return events.WorkerReady(record.name, record.incarnation, "ipc://it", "", now)
        case record if getattr(record, "phase", None) is Phase.RUNNING:
            return events.WorkFinished(record.name, record.incarnation, now)
        case instruction:
            return events.WorkerExited(instruction.worker, instruction.incarnation, chance.choice(CODES), "", now)


def anything(manager: PrimeManager, chance: random.Random, now: float) -> events.Event:
    """An event of any kind, of any worker, bundle or node; mostly of its incarnation or attempt of now."""
    state, off = manager.state, chance.choice((0, 0, 0, 0, 0, -1, 1))
    worker, other = (chance.choice([*state.workers.values()]) for _ in range(2))
    bundle = chance.choice([*state.bundles.values()])
    one = (worker.name, worker.incarnation + off)
    often: tuple[Callable[[], events.Event], ...] = (
        lambda: events.CreateFailed(*one, "no memory", now),
        lambda: events.ScaleRequested(worker.role, chance.randrange(1, 4), now),
        lambda: events.Tick(manager.deadline or now),
    )
    kinds: tuple[Callable[[], events.Event], ...] = (
        *often,
        *often,
        lambda: events.BeginJob(now),
        lambda: events.MasterChanged(state.epoch + chance.randrange(2), now),
        lambda: events.Allocated(bundle.name, bundle.attempt + off, "here", now),
        lambda: events.AllocationFailed(bundle.name, bundle.attempt + off, "no room", chance.random() < 0.5, now),
        lambda: events.Created(*one, "there", 8, now),
        lambda: events.WorkerReady(*one, "ipc://it", "", now),
        lambda: events.WorkerStarted(*one, now),
        lambda: events.WorkFinished(*one, now),
        lambda: events.EndAnnounced(*one, now),
        lambda: events.ExtensionRequested(*one, chance.choice((20.0, float("inf"))), now),
        lambda: events.WorkerExited(*one, chance.choice(CODES), "", now, chance.random() < 0.3),
        lambda: events.WorkerSuspected(*one, 4.0, now),
        lambda: events.WorkerHeard(*one, now),
        lambda: events.WorkerSilent(*one, 15.0, now),
        lambda: events.ChildrenChecked(*one, state.roles[worker.role].check, now),
        lambda: events.FailoverDone(*one, worker.notice, now),
        lambda: events.ReplaceRequested(other.name, other.incarnation, *one, "slow", now),
        lambda: events.NodeLost(chance.choice(("here", "there")), "gone", now),
        lambda: events.JobStopRequested("asked", 143, chance.choice(("", other.name)), now + 2.0),
        lambda: events.GuestsChanged(chance.choice(((), ("visitor",))), now),
        lambda: events.Tick(now),
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
        change = getattr(JobLedger, name)

        def watched(ledger: JobLedger, *arguments: Any, **options: Any) -> None:
            left.discard((before(ledger, *arguments), arguments[-1] if name == "set_stage" else arguments[1]))
            change(ledger, *arguments, **options)

        monkeypatch.setattr(JobLedger, name, watched)

    watch("set_phase", lambda _, worker, *rest: worker.phase)
    watch("set_place", lambda _, bundle, *rest: bundle.place)
    watch("set_stage", lambda ledger, _: ledger.state.stage)
    rare_steps()
    for seed in range(WALKS):
        chance, now = random.Random(seed), 0.0
        manager = PrimeManager(chance.choice(JOBS))
        manager.handle(events.BeginJob(0.0))
        for _ in range(100):
            now += chance.choice((0.0, 0.0, 1.0, 30.0))
            manager.handle((anything if chance.random() < 0.35 else answer)(manager, chance, now))
    assert not left, left
