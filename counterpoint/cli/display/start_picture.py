"""What `counterpoint status --start` prints: a bar for each phase of a job's start, on one axis from the command on."""

from __future__ import annotations

import time

from counterpoint.job.reading.start import ProcessStart, StartPhase
from counterpoint.transport.printable import printable, shortened
from counterpoint.transport.telemetry.start_phases import FIRST_STEP

NAME_WIDTH = 34
FIGURES_WIDTH = 7

LEAST_BAR = 20
"""Characters of the axis where the line is too short for more."""

LEGEND = "# works; . waits for another process; > goes on. Seconds, and seconds of CPU of the process itself"


def start_picture(processes: list[ProcessStart], width: int, now: float | None = None) -> list[str]:
    """Returns the lines, of `width` characters. Phases that go on end `now`."""
    now = time.time() if now is None else now
    begin = processes[0].phases[0].begin
    end = max(phase.end or now for process in processes for phase in process.phases)
    bar = max(LEAST_BAR, width - NAME_WIDTH - 2 * FIGURES_WIDTH - 3)
    seconds = max(end - begin, 1e-3)

    def place(moment: float) -> int:
        return round(min(max(moment - begin, 0), seconds) / seconds * bar)

    total = f"{seconds:.1f} s" if all(process.is_over for process in processes) else f"{seconds:.1f} s so far"
    lines = [
        f"{'the start of the job':<{NAME_WIDTH}}{'wall':>{FIGURES_WIDTH}}{'CPU':>{FIGURES_WIDTH}}  0{total:>{bar - 1}}"
    ]
    for process in processes:
        lines.append(f"{printable(process.process)}, process {process.pid}")
        lines += [_line(phase, place(phase.begin), place(phase.end or now), bar, now) for phase in process.phases]
    if ends := [each.end for process in processes for each in process.phases if each.phase == FIRST_STEP and each.end]:
        lines.append(f"from the command to the first step: {min(ends) - begin:.1f} s")
    return [*lines, LEGEND]


def _line(phase: StartPhase, begin: int, end: int, width: int, now: float) -> str:
    wall = f"{(phase.end or now) - phase.begin:.2f}"
    cpu = "" if phase.cpu is None else f"{phase.cpu:.2f}"
    mark = "." if phase.waits else "#"
    begin = min(begin, width - 1)
    bar = " " * begin + mark * max(1, end - begin)
    if phase.end is None:
        bar = f"{bar[:-1]}>"
    name = f"  {shortened(printable(phase.phase), NAME_WIDTH - 2)}"
    return f"{name:<{NAME_WIDTH}}{wall:>{FIGURES_WIDTH}}{cpu:>{FIGURES_WIDTH}}  {bar}"
