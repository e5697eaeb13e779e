"""The whole of a state machine as data, for snapshots, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from counterpoint.transport.typed import met
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.runner.codec import trial_of
from counterpoint.tune.runner.events import TellComplete, TellResult
from counterpoint.tune.runner.machine import ExperimentMachine
from counterpoint.tune.runner.progress import TrialProgress


def state_of(machine: ExperimentMachine) -> dict[str, Any]:
    """Returns all that `restore` needs, for `codec.pack`; it shares what it refers to with the machine."""
    search = machine.search
    return {
        "trials": [[trial, machine.table.progress(trial)] for trial in machine.table.trials],
        "stopping": machine.stopping,
        "may_start": machine.may_start,
        "saving": dict(machine.promised),
        "retained": list(machine.retained.values()),
        "waiting": {path: [trial.trial_id for trial in trials] for path, trials in machine.waiting.items()},
        "search": {
            "state": search.state,
            "told": search.told,
            "asked": search.asked,
            "finished": search.finished,
            "idle_after": search.idle_after,
            "backlog": [_told(told) for told in search.backlog],
        },
        "scheduler": machine.scheduler.state(),
    }


def restore(machine: ExperimentMachine, state: dict[str, Any]) -> None:
    """Gives a new machine a state, as packed and unpacked."""
    for fields, progress in state["trials"]:
        trial = trial_of(fields)
        _hold(machine, machine.table.add(trial, msgspec.convert(progress, met(TrialProgress))))
        for checkpoint in (trial.checkpoint, *trial.checkpoints):
            machine.kept.hold(checkpoint)
    machine.stopping, machine.may_start = state["stopping"], state["may_start"]
    machine.promised.update(state["saving"])
    machine.retained.update((each["path"], Checkpoint(**each)) for each in state["retained"])
    for path, ids in state["waiting"].items():
        machine.waiting[path] = [found[0] for trial_id in ids if (found := machine.table.get(trial_id)) is not None]
    search = state["search"]
    machine.search.state, machine.search.told = search["state"], search["told"]
    machine.search.asked, machine.search.finished = search["asked"], search["finished"]
    machine.search.idle_after = search.get("idle_after")
    machine.search.backlog.extend(
        TellResult(*told) if len(told) == len(dataclasses.fields(TellResult)) else TellComplete(*told)
        for told in search["backlog"]
    )
    machine.scheduler.restore_state(state["scheduler"])


def _told(told: TellResult | TellComplete) -> list[Any]:
    return [getattr(told, each.name) for each in dataclasses.fields(told)]


def _hold(machine: ExperimentMachine, progress: TrialProgress) -> None:
    machine.kept.hold(progress.for_scheduler)
    machine.kept.hold(None if progress.exploit is None else progress.exploit.source)
