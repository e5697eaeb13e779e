"""What is asked and not answered, as a function of the state: a new master repeats exactly this.

It may name more than what was lost with the former master: an instruction that was carried out, whose answer is on its way. So
whoever carries them out is idempotent.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.manager.events import CheckChildren, Instruction, Kill, Release, Start, Stop
from cluster.manager.placement import request
from cluster.manager.starting import creation, notice
from cluster.manager.state import JobState, Phase, Place, WorkerRecord
from cluster.spec import sub_master_name


def outstanding(state: JobState) -> list[Instruction]:
    """Returns every instruction that may not have been carried out, in an order in which they may be."""
    instructions: list[Instruction] = []
    for bundle in state.bundles.values():
        if bundle.place is Place.RELEASED or (bundle.place is Place.ALLOCATING and bundle.attempt > 1):
            instructions.append(Release(bundle.name))
        if bundle.place is Place.ALLOCATING:
            instructions.append(request(state.set_aside, bundle))
    for worker in state.workers.values():
        instructions += _of_worker(worker)
    for role in state.roles.values():
        if role.checking:
            sub_master = state.workers[sub_master_name(role.name)]
            instructions.append(CheckChildren(sub_master.name, sub_master.incarnation, role.check))
    return instructions


def _of_worker(worker: WorkerRecord) -> Iterator[Instruction]:
    match worker.phase:
        case Phase.CREATING:
            yield creation(worker)
        case Phase.STARTING:
            yield Start(worker.name, worker.incarnation)
        case Phase.STUCK:
            yield Kill(worker.name, worker.incarnation)
        case Phase.STOPPING | Phase.RECYCLING if worker.killed:
            yield Kill(worker.name, worker.incarnation)
        case Phase.STOPPING | Phase.RECYCLING:
            yield Stop(worker.name, worker.incarnation)
    if worker.noticed and worker.phase in (Phase.READY, Phase.STARTING, Phase.RUNNING, Phase.FINISHED):
        yield notice(worker)
