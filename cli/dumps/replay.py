"""`counterpoint replay DUMP`: runs the daemon's own step boundary over a dump and prints its times (`job/replay/replay.py`)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cli.arguments.replay import add_arguments, parse, settings_of
from cli.display.console import console_for
from cli.display.replay_tables import print_replay, print_whole_step
from job.replay.dump_directory import open_trusted
from job.replay.lag_trace import LagTrace
from job.replay.replay import BASELINE, BOUNDARY, FINALIZE, replay_dump
from job.replay.whole_step import whole_step
from transport.errors import UserError

PICTURES = (".png", ".svg", ".pdf")
PIPE_WIDTH = 120

INK, MUTED, GRID, LAG, IDLE = "#1f2933", "#7b8794", "#e4e7eb", "#0f766e", "#f5f7fa"
BANDS = ("#dbeafe", "#fef3c7", "#dcfce7", "#fce7f3", "#ede9fe", "#ffedd5", "#cffafe")

BEFORE_SECONDS = 0.25
"""Seconds of the idle baseline that are shown for comparison."""


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for a dump that cannot be replayed."""
    given = parse(_parser(), arguments)
    if given.timeline is not None and given.timeline.suffix not in PICTURES:
        raise UserError(f"--timeline {given.timeline}: expected a file that ends in {', '.join(PICTURES)}")
    settings = settings_of(given)
    dump = open_trusted(given.dump, given.trust)
    try:
        found = replay_dump(dump, settings)
    except ValueError as error:
        raise UserError(f"{given.dump}: {error}") from None
    step = whole_step(given.dump, dump.header.step)
    if given.json:
        print(json.dumps(found.as_json() | {"whole_step": step and step.as_json()}, indent=2))
    else:
        console = console_for(pipe_width=PIPE_WIDTH)
        print_replay(found, dump, console)
        print_whole_step(step, console)
    if given.timeline is not None:
        draw(found.trace, given.timeline, f"{dump.directory}: {found.nbytes / 1e6:,.0f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint replay",
        description="Runs the daemon's own step boundary over a dump, after an idle baseline, and shows the wall time of each "
        "phase and the event loop's lag meanwhile, sampled every millisecond. What the boundary writes goes to a temporary "
        "directory (TMPDIR).",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw phases against lag: PNG, SVG or PDF")
    return parser


def draw(trace: LagTrace, path: Path, title: str) -> Path:
    """Draws the last round of `trace` into `path` (PNG, SVG or PDF, by its suffix) and returns it.

    Raises `ValueError` for another suffix, `OSError`.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    finalized = [span for span in trace.spans if span.name == FINALIZE][-1]
    phases = sorted(
        (s for s in trace.spans if s.name not in (BASELINE, BOUNDARY) and s.start >= finalized.start),
        key=lambda span: span.start,
    )
    first, last = finalized.start - BEFORE_SECONDS, max(span.end for span in phases)
    figure = Figure(figsize=(11, 4.5), dpi=150, facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-BEFORE_SECONDS, 0, color=IDLE, zorder=0)
    handles = [Patch(color=IDLE, label="idle")]
    for span, colour in zip(phases, BANDS * len(phases), strict=False):
        axes.axvspan(span.start - finalized.start, span.end - finalized.start, color=colour, zorder=0)
        handles.append(Patch(color=colour, label=f"{span.name} {1e3 * span.seconds:,.0f} ms"))
    samples = [(t, lag) for t, lag in zip(trace.times, trace.lags, strict=True) if first <= t <= last]
    axes.vlines(
        [time - finalized.start for time, _ in samples], 0, [1e3 * lag for _, lag in samples], color=LAG, linewidth=0.8
    )
    axes.set_xlim(first - finalized.start, last - finalized.start)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since finalizing began", color=INK)
    axes.set_ylabel("event-loop lag, ms", color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED)
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path)
    return path
