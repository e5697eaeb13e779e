"""A role gets more workers or fewer, between its limits: new ranks are created, the highest ranks are stopped.

Somebody asks for it, or there is no place for all of them.
"""

from __future__ import annotations

from cluster.manager.events import Instruction, ManagerStage, ScaleRequested
from cluster.manager.ledger import Ledger
from cluster.manager.placement import allocate, retry_later
from cluster.manager.restarts import recycle, remove
from cluster.manager.starting import create_if_possible
from cluster.manager.state import DEAD, WELL, BundleRecord, Phase, Place, add_worker
from cluster.spec import worker_name


def scale(ledger: Ledger, event: ScaleRequested) -> list[Instruction]:
    """Brings a role to so many workers. A count beyond the role's limits changes nothing."""
    role = ledger.state.roles.get(event.role)
    if role is None or ledger.stops or not ledger.state.begun:
        return []
    spec, before = ledger.roles[event.role], role.wanted
    if not spec.fewest <= event.count <= spec.most:
        return []
    role.wanted = event.count
    instructions: list[Instruction] = []
    for rank in range(before, event.count):
        instructions += _add(ledger, event.role, rank, event.at)
    for rank in reversed(range(event.count, before)):
        instructions += _take_out(ledger, event.role, rank, event.at)
    return instructions


def _add(ledger: Ledger, role: str, rank: int, at: float) -> list[Instruction]:
    """Creates a worker of a new rank, or of one that had been taken out; one that is still ending will be created again."""
    worker = ledger.state.workers.get(worker_name(role, rank))
    if worker is None:
        worker = add_worker(ledger.state, ledger.spec, role, rank)
        ledger.add(worker)
    elif worker.phase is Phase.REMOVED:
        ledger.set_phase(worker, Phase.WAITING)
    else:
        return []
    worker.unblocked = ledger.state.stage is not ManagerStage.INIT
    ledger.state.roles[role].changed.append(worker.name)
    bundle = ledger.state.bundles[worker.bundle]
    if bundle.place in (Place.NONE, Place.RELEASED):
        return allocate(ledger, bundle)
    return create_if_possible(ledger, worker, at)


def _take_out(ledger: Ledger, role: str, rank: int, at: float) -> list[Instruction]:
    worker = ledger.state.workers[worker_name(role, rank)]
    if worker.phase in DEAD:
        return remove(ledger, worker, at)
    if worker.settled or worker.phase not in WELL | {Phase.CREATING}:  # it ends by itself, or has ended
        return []
    return recycle(ledger, worker, at)


def make_room(ledger: Ledger, bundle: BundleRecord, at: float) -> list[Instruction] | None:
    """Goes on with one worker fewer if a worker can never be placed; None if its role needs all that it has.

    The highest rank leaves, whoever has no place, and so may leave its own place to it.
    """
    worker = ledger.state.workers.get(bundle.workers[0])
    if worker is None or worker.rank < 0 or len(bundle.workers) > 1:
        return None
    role = ledger.state.roles[worker.role]
    leaving = ledger.recycling[worker.role] > 0
    if not leaving and role.wanted <= ledger.spec_of(worker).fewest:
        return None
    if leaving or worker.rank < role.wanted - 1:
        retry_later(ledger, bundle, at)
    return [] if leaving else scale(ledger, ScaleRequested(worker.role, role.wanted - 1, at))
