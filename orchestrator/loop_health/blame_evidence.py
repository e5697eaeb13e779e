"""What kept the loop, told from how long its thread ran, waited for a CPU, or did neither. A pure function of a few numbers.

The reasons are few: it ran a callback; another thread held the GIL; it was in a call that waits; the machine ran something else.
Each leaves other traces in the clocks that `orchestrator/loop_health/thread_clocks.py` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.loop_health.thread_clocks import Doing


class Kind(StrEnum):
    """Why the loop was late."""

    CALLBACK = "callback"
    """The loop ran: a callback, or, where no code is named, something whose stack was not seen."""
    GIL = "gil"
    """Another thread held the GIL."""
    WAIT = "wait"
    """The loop was in a call that waits, for time, a lock or a disk, with neither CPU nor GIL."""
    MACHINE = "machine"
    """The CPU was given to others, or the machine stood still."""
    UNKNOWN = "unknown"
    """It cannot be told."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one stretch of time during which the loop was late. Seconds."""

    late: float
    """How long it was."""
    in_callback: bool
    """Whether the loop's stack shows a callback, at the end of the stretch."""
    loop_cpu: float | None
    """How long the loop's thread ran; None where no clock tells."""
    loop_delay: float | None
    """How long it was ready to run without a CPU, as far as the kernel has noted by now."""
    others_cpu: float
    """How long the process's other threads ran, together."""
    overslept: float
    """How much later than asked the watching thread itself woke: it needs CPU and GIL, too."""
    doing: Doing | None
    """What the loop's thread was doing at the end, while the watching thread held the GIL."""


def shares(evidence: Evidence) -> dict[Kind, float]:
    """How much of the time goes to which reason, in seconds that add up to `late`. A tenth or less is left to the greatest."""
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
    kept = {kind: seconds for kind, seconds in parts.items() if seconds > late / 10 or kind is greatest}
    kept[greatest] += late - sum(kept.values())
    return kept


def _shares_of_idleness(evidence: Evidence, idle: float) -> dict[Kind, float]:
    """Why the loop's thread neither ran nor is known to have waited for a CPU for that long."""
    others_ran = min(max(0.0, evidence.others_cpu), idle)
    watcher_too = evidence.overslept >= idle / 2
    if evidence.doing is Doing.BLOCKED:
        # Between callbacks it is blocked in the kernel's own wait for events, of which one is overdue.
        return {Kind.WAIT if evidence.in_callback else Kind.MACHINE: idle}
    if watcher_too:
        # GIL or CPU were withheld from both. Who held the GIL meanwhile ran no longer than its clock says.
        return {Kind.GIL: others_ran, Kind.MACHINE: idle - others_ran}
    if evidence.doing is Doing.RUNNING:
        return {Kind.MACHINE: idle}  # the kernel notes a wait for a CPU when it ends, and this one has not
    if evidence.doing is Doing.WANTING_GIL and others_ran >= idle / 2:
        return {Kind.GIL: idle}  # several in turn, with the watcher among them
    return {Kind.WAIT if evidence.in_callback else Kind.UNKNOWN: idle}
