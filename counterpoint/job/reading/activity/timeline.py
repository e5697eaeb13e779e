"""The timeline around a step: lanes of the orchestrator, each server and the trainer, and the idle share of each role.

A role is busy while one of its spans says so; what it merely waits for is drawn and does not count. A server that several runs
share is one lane, joined by its URL; the trainer's lane has the work of all runs. Roles on other machines have clocks of their
own, which are taken as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from counterpoint.job.reading.activity.span_files import STEP, SpanFile
from counterpoint.job.reading.rollouts.view import name_of
from counterpoint.orchestrator.scheduling.scheduler import Awaited
from counterpoint.transport.config import Config
from counterpoint.transport.telemetry.intervals import Interval, busy_seconds
from counterpoint.transport.telemetry.spans import SPANS_FILE, Span

Role = Literal["orchestrator", "inference", "trainer"]

StepSpan = tuple[int, float, float]
"""A step, its begin and its end."""

STEPS_NAMED = 1_000

WAITING = frozenset({*get_args(Awaited), "wait", "out"} - {"finalize"})
"""Spans during which a role waits."""

BESIDE = frozenset({"deliver", "load_weights", "write_checkpoint"})
"""Spans beside a role's own work, which have a lane of their own and do not count as work."""

MAX_LANES = 48
"""Servers that are drawn."""

MAX_BARS = 400
"""The bars of a lane."""

PIXELS = 1_000
"""Bars of one name that are closer than this part of the window are drawn as one."""

MAX_OTHER_RUNS = 16
"""Other runs of the job whose requests at the servers are drawn, too: those that wrote last."""

MAX_FILES = 64
"""Most files whose indexes are kept."""


class TimelineStep(Config):
    """One step in the window."""

    step: int
    """The number of the step."""
    begin: float
    """The time when it began, which is when the one before it ended, in Unix seconds."""
    end: float
    """The time when it was committed and done."""


class TimelineBar(Config):
    """Something that was done, or several short things that were drawn as one."""

    name: str
    """The name of what was done."""
    begin: float
    """Unix seconds, cut to the window."""
    end: float
    """Unix seconds, cut to the window."""
    busy: float
    """Seconds of it that were really spent so."""
    waiting: bool
    """Whether this is waiting, and no work."""
    run: str
    """The run that it was for; empty if for none."""
    step: int
    """The step that it was for; 0 if for none."""
    count: int
    """How many spans it stands for."""
    detail: str
    """What is known besides, such as the version of weights."""


class TimelineLane(Config):
    """What one process did, or one side of it."""

    key: str
    """Unique in the answer."""
    role: Role
    """The role that did the work."""
    title: str
    """The title for people: a server's URL, for example."""
    bars: list[TimelineBar]
    """The bars, in the order of their beginnings. Those of different names may overlap."""
    left_out: int
    """The shortest bars, which are too many."""


class IdleShares(Config):
    """Shares of the window, from 0 to 1; null where nothing is known of a role."""

    orchestrator: float | None
    """Share in which it only waited."""
    inference: float | None
    """Share in which a server had neither a request nor weights to load: the mean of the servers."""
    trainer: float | None
    """Share in which it trained, published and saved nothing, for any run."""


class TimelineAnswer(Config):
    """The timeline of some steps."""

    begin: float
    """The begin of the window, in unix seconds; 0 without a step."""
    end: float
    """The end of the window, in unix seconds."""
    known: list[int]
    """All steps whose spans are kept, the newest 1,000."""
    steps: list[TimelineStep]
    """The steps that are shown; none while the run has committed no step."""
    lanes: list[TimelineLane]
    """The lanes, from the orchestrator over the servers to the trainer."""
    idle: IdleShares
    """How much of the window each role was idle."""
    servers_left_out: int
    """Servers that are too many to be drawn."""


class Timelines:
    """The spans of one job. Not for several threads at once (`Jobs.reading`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, SpanFile] = {}

    def steps(self, run: str) -> list[StepSpan]:
        """Returns the steps that spans tell of, with begin and end, ascending: the orchestrator's, or else the trainer's."""
        found = self._of_run(run).steps(run) or self._of_trainer().steps(run)
        return [(step, *found[step]) for step in sorted(found)]

    def show(
        self, run: str, known: Sequence[StepSpan], shown: Sequence[StepSpan], urls: Sequence[str]
    ) -> TimelineAnswer:
        """Returns the timeline of some of the `known` steps. `urls` are the servers that there are, whatever they did."""
        if not shown:
            idle = IdleShares(orchestrator=None, inference=None, trainer=None)
            return TimelineAnswer(begin=0.0, end=0.0, known=[], steps=[], lanes=[], idle=idle, servers_left_out=0)
        begin, end = min(each[1] for each in shown), max(each[2] for each in shown)
        own = [span for span in self._of_run(run).between(begin, end) if span.run in ("", run)]
        trained = list(self._of_trainer().between(begin, end))
        served = [span for span in own if span.role == "inference"] + self._served_others(run, begin, end)
        orchestrated = [span for span in own if span.role == "orchestrator"]
        servers, left_out = _by_server(served, urls)
        lanes = [
            *_lanes("orchestrator", "orchestrator", orchestrated, begin, end),
            *(_lane(f"server {url}", "inference", url, spans, begin, end) for url, spans in servers.items()),
            *_lanes(
                "trainer", "trainer", [each for each in trained if each.name != "wait" or each.run == run], begin, end
            ),
        ]
        return TimelineAnswer(
            begin=begin,
            end=end,
            known=[step for step, _, _ in known[-STEPS_NAMED:]],
            steps=[TimelineStep(step=step, begin=begin, end=end) for step, begin, end in shown],
            lanes=lanes,
            idle=_idle(orchestrated, servers, trained, begin, end),
            servers_left_out=left_out,
        )

    def _served_others(self, run: str, begin: float, end: float) -> list[Span]:
        """Returns what other runs' orchestrators saw of the servers."""
        found = []
        for directory in self._directory.glob("run_*"):
            try:
                if directory.name != f"run_{run}" and not directory.is_symlink():
                    found.append(((directory / SPANS_FILE).stat().st_mtime, directory.name.removeprefix("run_")))
            except OSError:
                continue
        others = [name for written, name in sorted(found, reverse=True) if written >= begin][:MAX_OTHER_RUNS]
        return [span for name in others for span in self._of_run(name).between(begin, end) if span.role == "inference"]

    def _of_run(self, run: str) -> SpanFile:
        return self._file(f"run_{run}")

    def _of_trainer(self) -> SpanFile:
        return self._file("trainer")

    def _file(self, directory: str) -> SpanFile:
        file = self._files.pop(directory, None) or SpanFile(self._directory / directory / SPANS_FILE)
        self._files[directory] = file  # the last of the dictionary is the one used last
        if len(self._files) > MAX_FILES:
            del self._files[next(iter(self._files))]
        file.update()
        return file


def _by_server(spans: Iterable[Span], urls: Sequence[str]) -> tuple[dict[str, list[Span]], int]:
    """Returns the spans of each server, by URL, and how many servers are left out."""
    servers: dict[str, list[Span]] = {url: [] for url in urls}
    for span in spans:
        if isinstance(url := span.attributes.get("server"), str):
            servers.setdefault(url, []).append(span)
    kept = sorted(servers)[:MAX_LANES]
    return {url: servers[url] for url in kept}, len(servers) - len(kept)


def _idle(
    orchestrated: Sequence[Span],
    servers: Mapping[str, Sequence[Span]],
    trained: Sequence[Span],
    begin: float,
    end: float,
) -> IdleShares:
    shares = [share for spans in servers.values() if (share := _idle_share(spans, begin, end)) is not None]
    known = bool(orchestrated) or any(servers.values())
    return IdleShares(
        orchestrator=_idle_share(orchestrated, begin, end) if orchestrated else None,
        inference=sum(shares) / len(shares) if known and shares else None,
        trainer=_idle_share(trained, begin, end) if trained else None,
    )


def _idle_share(spans: Iterable[Span], begin: float, end: float) -> float | None:
    """Returns the share of the time in which none of the spans was busy; None of no time."""
    if end <= begin:
        return None
    work = (span.interval for span in spans if span.name not in WAITING | BESIDE and span.name != STEP)
    return min(1.0, max(0.0, 1 - busy_seconds(work, begin, end) / (end - begin)))


def _lanes(key: str, role: Role, spans: Iterable[Span], begin: float, end: float) -> list[TimelineLane]:
    """Returns a role's own lane, and that of what goes on beside it, if anything does."""
    own: list[Span] = []
    beside: list[Span] = []
    for span in spans:
        (beside if span.name in BESIDE else own).append(span)
    lanes = [_lane(key, role, role, own, begin, end)] if own or beside else []
    return [*lanes, _lane(f"{key} beside", role, f"{role}, beside", beside, begin, end)] if beside else lanes


def _lane(key: str, role: Role, title: str, spans: Iterable[Span], begin: float, end: float) -> TimelineLane:
    by_name: defaultdict[tuple[str, str], list[TimelineBar]] = defaultdict(list)
    gap = (end - begin) / PIXELS
    for span in sorted((each for each in spans if each.name != STEP), key=lambda each: each.begin):
        bars = by_name[span.name, span.run]
        bar = _bar_of(span, begin, end)
        if bars and bar.begin - bars[-1].end < gap and bar.end - bar.begin < 4 * gap:
            _join(bars[-1], bar)
        else:
            bars.append(bar)
    found = sorted((bar for bars in by_name.values() for bar in bars), key=lambda bar: (bar.begin, bar.end))
    longest = sorted(found, key=lambda bar: bar.begin - bar.end)[:MAX_BARS]
    kept = found if len(found) <= MAX_BARS else sorted(longest, key=lambda bar: (bar.begin, bar.end))
    return TimelineLane(key=name_of(key), role=role, title=name_of(title), bars=kept, left_out=len(found) - len(kept))


def _bar_of(span: Span, begin: float, end: float) -> TimelineBar:
    """Cuts a span to the window."""
    first, last = max(span.begin, begin), min(span.end, end)
    detail = ", ".join(f"{name} {value}" for name, value in span.attributes.items() if name != "server")
    busy = busy_seconds([Interval(span.begin, span.end, span.interval.busy)], first, last)
    return TimelineBar.model_construct(
        name=name_of(span.name),
        begin=first,
        end=last,
        busy=busy,
        waiting=span.name in WAITING,
        run=name_of(span.run),
        step=span.step,
        count=1,
        detail=name_of(detail),
    )


def _join(bar: TimelineBar, other: TimelineBar) -> None:
    bar.end = max(bar.end, other.end)
    bar.busy = min(bar.busy + other.busy, bar.end - bar.begin)
    bar.count += other.count
    bar.step = other.step
