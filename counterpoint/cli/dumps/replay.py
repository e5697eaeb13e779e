"""The commands that run the daemon's own step boundary over a dump: `counterpoint replay` and `counterpoint attribute`.

`replay DUMP` prints the times of the boundary (`counterpoint/job/replay/replay.py`). `attribute DUMP` prints which of its phases
block the loop (`counterpoint/job/replay/attribute.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from counterpoint.cli.display.console import console_for
from counterpoint.cli.display.replay_tables import attribution_table, print_replay, print_whole_step
from counterpoint.job.replay.attribute import attribute_dump
from counterpoint.job.replay.dump_directory import open_trusted
from counterpoint.job.replay.lag_trace import LagTrace
from counterpoint.job.replay.replay import BASELINE, BOUNDARY, FINALIZE, Settings, replay_dump
from counterpoint.job.replay.whole_step import whole_step
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.extras import require

PICTURES = (".png", ".svg", ".pdf")
PIPE_WIDTH = 120

INK, MUTED, GRID, LAG, IDLE = "#1f2933", "#7b8794", "#e4e7eb", "#0f766e", "#f5f7fa"
BANDS = ("#dbeafe", "#fef3c7", "#dcfce7", "#fce7f3", "#ede9fe", "#ffedd5", "#cffafe")

BEFORE_SECONDS = 0.25
"""Seconds of the idle baseline that are shown for comparison."""


def replay(arguments: list[str]) -> int:
    """`counterpoint replay DUMP`: prints the times of the step boundary.

    Raises `UserError` for a dump that cannot be replayed.
    """
    given = parse(_replay_parser(), arguments)
    if given.timeline is not None and given.timeline.suffix not in PICTURES:
        raise UserError(f"--timeline {given.timeline}: expected a file that ends in {', '.join(PICTURES)}")
    if given.timeline is not None:
        require("--timeline", "matplotlib")
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


def _replay_parser() -> argparse.ArgumentParser:
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


def attribute(arguments: list[str]) -> int:
    """`counterpoint attribute DUMP`: prints which phases of the step boundary block the loop.

    Raises `UserError` for a dump that cannot be replayed.
    """
    given = parse(_attribute_parser(), arguments)
    dump = open_trusted(given.dump, given.trust)
    how = {"rounds": 1, "baseline_seconds": 0.5} if given.quick else {"rounds": 3, "baseline_seconds": 1.0}
    settings = settings_of(given, **how)
    try:
        found = attribute_dump(dump, settings)
    except ValueError as error:
        raise UserError(f"{given.dump}: {error}") from None
    if given.json:
        print(json.dumps([attribution.as_json() for attribution in found], indent=2))
    else:
        console = console_for(pipe_width=PIPE_WIDTH)
        console.print(attribution_table(found, dump))
        print_whole_step(whole_step(dump.directory, dump.header.step), console)
    return 0


def _attribute_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint attribute",
        description="Runs each phase of the step boundary over a dump alone, then together with all before it, beside an idle "
        "baseline, and says which block the event loop and which only take time. A phase blocks when it makes the loop "
        "more than twice as late as it is idle, and by more than 5 ms.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that both commands have to `parser`."""
    parser.add_argument(
        "--synthetic-traffic",
        type=int,
        default=0,
        metavar="N",
        help="tasks that keep the loop busy meanwhile, as rollouts in flight do (default: none)",
    )
    parser.add_argument(
        "--gather-chunk-size",
        type=int,
        metavar="N",
        help="rollouts merged in one thread call (default: the dump's own)",
    )
    parser.add_argument("--process-pool", action="store_true", help="merge in a process instead of a thread")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import and call the advantage function that the dump names, if it is not built in",
    )
    parser.add_argument("--dump", dest="named", type=Path, metavar="DUMP", help="the same, by name")
    parser.add_argument(
        "dump", type=Path, nargs="?", metavar="DUMP", help="a dump's directory, such as raw_rollouts/step_7"
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments, with the one dump as `dump`, however it was given. Exits as a parser does."""
    given = parser.parse_args(arguments)
    dumps = [dump for dump in (given.dump, given.named) if dump is not None]
    if len(dumps) != 1:
        parser.error(f"expected one DUMP, found {len(dumps)}")
    (given.dump,) = dumps
    return given


def settings_of(given: argparse.Namespace, **settings: float) -> Settings:
    """Returns the settings of a replay. Raises `UserError` for a number that is too small."""
    for name in ("synthetic_traffic", "gather_chunk_size"):
        value = getattr(given, name)
        least = 0 if name == "synthetic_traffic" else 1
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} = {value}; expected at least {least}")
    return Settings(given.synthetic_traffic, given.gather_chunk_size, given.process_pool, **settings)  # type: ignore[arg-type]


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
