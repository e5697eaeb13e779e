"""Finds why the loop was late from how long its thread ran, waited for a CPU, or did neither. A pure function of numbers.

The reasons: it ran a callback; another thread held the GIL; it was in a call that waits; the machine ran something else.
Each shows in the clocks that `counterpoint/run/loop_health/thread_clocks.py` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from counterpoint.run.loop_health.thread_clocks import Doing

_LONG_SECONDS = 0.02
"""A callback that ran for so long is always named."""


class Kind(StrEnum):
    """Why the loop was late."""

    CALLBACK = "callback"
    """The loop ran a callback; without a place, its stack was not seen."""
    GIL = "gil"
    """Another thread held the GIL."""
    WAIT = "wait"
    """The loop was in a call that waits for time, a lock or a disk, with neither CPU nor GIL."""
    MACHINE = "machine"
    """Other processes had the CPU, or the machine was suspended."""
    UNKNOWN = "unknown"
    """The clocks do not show the reason."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measurements of one interval during which the loop was late. In seconds."""

    late: float
    """Length of the interval."""
    in_callback: bool
    """Whether the loop's stack has a callback, at the end of the interval."""
    loop_cpu: float | None
    """How long the loop's thread ran; None without such a clock."""
    loop_delay: float | None
    """How long it was ready to run without a CPU, as far as the kernel has recorded."""
    others_cpu: float
    """How long the process's other threads ran, in total."""
    overslept: float
    """How much later than requested the watching thread woke: it needs CPU and GIL, too."""
    doing: Doing | None
    """What the loop's thread was doing at the end, while the watching thread held the GIL."""


def shares(evidence: Evidence) -> dict[Kind, float]:
    """Returns seconds by reason, which add up to `late`.

    Shares of a tenth or less are added to the greatest, but for a callback that ran for long: on a machine without CPU to spare
    it had only a small part of the time, and it is what the loop was doing.
    """
    late = evidence.late
    if evidence.loop_cpu is None:
        return {Kind.CALLBACK if evidence.in_callback else Kind.UNKNOWN: late}
    ran = min(max(0.0, evidence.loop_cpu), late)
    delayed = min(max(0.0, evidence.loop_delay or 0.0), late - ran)
    idle = late - ran - delayed
    parts = {Kind.CALLBACK: ran, Kind.MACHINE: delayed}
    for kind, seconds in _shares_of_idleness(evidence, idle).items():
        parts[kind] = parts.get(kind, 0.0) + seconds
    greatest = max(parts, key=lambda kind: parts[kind])
    always = {greatest} | ({Kind.CALLBACK} if evidence.in_callback and ran >= _LONG_SECONDS else set())
    kept = {kind: seconds for kind, seconds in parts.items() if seconds > late / 10 or kind in always}
    kept[greatest] += late - sum(kept.values())
    return kept


def _shares_of_idleness(evidence: Evidence, idle: float) -> dict[Kind, float]:
    """Returns seconds by reason for the time in which the loop's thread neither ran nor verifiably waited for a CPU."""
    others_ran = min(max(0.0, evidence.others_cpu), idle)
    watcher_too = evidence.overslept >= idle / 2
    if evidence.doing is Doing.BLOCKED:
        # Between callbacks it waits for events in the kernel, and one is overdue.
        return {Kind.WAIT if evidence.in_callback else Kind.MACHINE: idle}
    if watcher_too:
        # Both threads lacked GIL or CPU. The thread that held the GIL ran no longer than its clock shows.
        return {Kind.GIL: others_ran, Kind.MACHINE: idle - others_ran}
    if evidence.doing is Doing.RUNNING:
        return {Kind.MACHINE: idle}  # the kernel records a wait for a CPU when it ends; this one has not ended
    if evidence.doing is Doing.WANTING_GIL and others_ran >= idle / 2:
        return {Kind.GIL: idle}  # several in turn, with the watcher among them
    return {Kind.WAIT if evidence.in_callback else Kind.UNKNOWN: idle}
