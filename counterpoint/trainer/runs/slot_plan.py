"""Decides which runs have a slot at the trainer. Pure; `counterpoint/trainer/runs/registry.py` calls it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """What changes at a discovery: first the leaving, then the admitted."""

    leaving: dict[int, str]
    """Slots given back: slot to run id."""
    admitted: dict[int, str]
    """Slots taken: slot to run id."""
    waiting: list[str]
    """Runs without a slot, in the order in which they get one."""


def plan(
    slots: Mapping[int, str],
    since: Mapping[str, int],
    *,
    max_runs: int,
    renewed: Collection[str] = (),
    present: Collection[str] | None = None,
) -> SlotChanges:
    """Decides what changes in the slots.

    A run without a valid configuration leaves. Free slots are taken lowest first, by the runs that have waited longest. If more
    runs wait than slots are free, runs whose orchestrators are absent leave, too, the one with the oldest configuration first; if
    no run waits, they stay, and are ready when their orchestrators return.

    Args:
        slots: slot to run id, of the taken ones.
        since: of each run with a valid configuration that is not evicted, when that was written; ties are broken by id.
        max_runs: the number of slots.
        renewed: runs whose configuration differs from that of their admission: they leave, and get the same slot again.
        present: runs whose orchestrators are present; no other gets a slot. None: all count as present.
    """
    leaving = {slot: run_id for slot, run_id in slots.items() if run_id not in since or run_id in renewed}
    admitted = {slot: run_id for slot, run_id in leaving.items() if run_id in since}
    staying = {slot: run_id for slot, run_id in slots.items() if slot not in leaving}
    held = {*staying.values(), *admitted.values()}
    queue = sorted(
        (run_id for run_id in since if run_id not in held and (present is None or run_id in present)),
        key=lambda run_id: (since[run_id], run_id),
    )
    free = [slot for slot in range(max_runs) if slot not in staying and slot not in admitted]
    away = sorted(
        (slot for slot, run_id in staying.items() if present is not None and run_id not in present),
        key=lambda slot: (since[staying[slot]], slot),
    )
    yielding = away[: max(len(queue) - len(free), 0)]
    leaving |= {slot: staying[slot] for slot in yielding}
    available = sorted(free + yielding)
    admitted |= dict(zip(available, queue, strict=False))
    return SlotChanges(dict(sorted(leaving.items())), dict(sorted(admitted.items())), queue[len(available) :])
