"""Which side of a run waits, its trainer or its servers, by the phases of its newest steps, and what would change that."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from counterpoint.job.reading.metrics.metrics_lines import Line
from counterpoint.run.config import ScheduleConfig

WORTH_SAYING = 0.1
"""Less idle time is not worth a change."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the time, of 1; None where no step says so."""

    trainer: float | None
    """The share in which the trainer waits for a batch."""
    servers: float | None
    """The share in which no rollout may start until the trainer has newer weights."""


def idle_of(shipped: Iterable[Line], trained: Iterable[Line]) -> Idle:
    """Returns what the lines of the orchestrator and of the trainer say."""
    trained, shipped = list(trained), list(shipped)
    phases = [
        (line.get("phase/wait", 0.0), sum(line.get(f"phase/{name}", 0.0) for name in _TRAINER)) for line in trained
    ]
    return Idle(
        _share(sum(wait for wait, _ in phases), sum(whole for _, whole in phases)),
        _share(
            sum(line.get("phase/wait_trainer", 0.0) for line in shipped),
            sum(line.get("wall_seconds", 0.0) for line in shipped),
        ),
    )


_TRAINER = ("wait", "train", "broadcast")


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def advice(idle: Idle, schedule: ScheduleConfig, servers: int, ranks: int) -> str:
    """Returns who waits how long and what would end it, in words; empty if neither waits for long.

    If one side waits the share w of a step, the other has to be 1 / (1 - w) times as fast. So many times as many servers are,
    or as many rollouts in flight, as long as a server generates a token of more sequences in about the same time; the lead
    bounds these by `max_lead_steps` times `rollouts_per_step`.
    """
    trainer, waits = idle.trainer or 0.0, idle.servers or 0.0
    if max(trainer, waits) < WORTH_SAYING or max(trainer, waits) >= 1:
        return ""
    if trainer >= waits:
        faster, group = 1 / (1 - trainer), schedule.group_size
        more = max(1, round(servers * (faster - 1)))
        ways = [f"{more} more server{'s' if more > 1 else ''}"] if servers else []
        rollouts = math.ceil(schedule.rollouts_per_step * faster / group) * group
        limit = schedule.max_inflight_rollouts
        if limit == "auto" or schedule.max_lead_steps * rollouts <= limit:
            ways.append(f"rollouts_per_step = {rollouts}")
        return f"the trainer waits {trainer:.0%}" + (f": {', or '.join(ways)}" if ways else "")
    fewer = math.floor(servers * waits)
    ways = [f"{fewer} fewer server{'s' if fewer > 1 else ''}"] if 0 < fewer < servers else []
    ways.append(f"trainer.processes = {math.ceil(ranks / (1 - waits))}")
    return f"the servers wait {waits:.0%}: {', or '.join(ways)}"
