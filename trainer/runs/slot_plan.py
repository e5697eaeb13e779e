"""Which runs have a place at the trainer: a pure decision, which `trainer/runs/manager.py` carries out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Changes:
    """What follows from a look: first the leaving, then the admitted."""

    leaving: dict[int, str]
    """Places given back: index to run id."""
    admitted: dict[int, str]
    """Places taken: index to run id."""
    waiting: list[str]
    """Runs for which there is no place, in the order in which they get one."""


def plan(
    places: Mapping[int, str],
    since: Mapping[str, int],
    *,
    max_runs: int,
    renewed: Collection[str] = (),
    present: Collection[str] | None = None,
) -> Changes:
    """What changes in `places` (index to run id).

    A run without a valid configuration leaves. Free indices are taken lowest first, by the runs that have waited longest. Where
    more wait than there is room for, runs whose orchestrators are away leave, too, those first whose configuration is the
    oldest; with nobody waiting they stay, so as to be ready when they come back.

    Args:
        since: of each run with a valid configuration that is not evicted, when that was written; then by id.
        renewed: runs whose configuration is another than the one that they were admitted with: they leave, and come back
            to the same place.
        present: runs whose orchestrators are there; no other gets a place. None: all count as present.
    """
    leaving = {index: run_id for index, run_id in places.items() if run_id not in since or run_id in renewed}
    admitted = {index: run_id for index, run_id in leaving.items() if run_id in since}
    staying = {index: run_id for index, run_id in places.items() if index not in leaving}
    held = {*staying.values(), *admitted.values()}
    queue = sorted(
        (run_id for run_id in since if run_id not in held and (present is None or run_id in present)),
        key=lambda run_id: (since[run_id], run_id),
    )
    free = [index for index in range(max_runs) if index not in staying and index not in admitted]
    away = sorted(
        (index for index, run_id in staying.items() if present is not None and run_id not in present),
        key=lambda index: (since[staying[index]], index),
    )
    yielding = away[: max(len(queue) - len(free), 0)]
    leaving |= {index: staying[index] for index in yielding}
    places_to_take = sorted(free + yielding)
    admitted |= dict(zip(places_to_take, queue, strict=False))
    return Changes(dict(sorted(leaving.items())), dict(sorted(admitted.items())), queue[len(places_to_take) :])
