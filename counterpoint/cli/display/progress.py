"""The progress of a job: a live panel on a terminal, plain lines elsewhere. Neither is silent for a minute."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from counterpoint.cli.display.rollouts import print_rollout
from counterpoint.cluster.manager.ending import NOT_READY
from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.number_format import duration, milliseconds, number, scientific
from counterpoint.job.reading.metrics.evaluations import Evaluated
from counterpoint.job.reading.metrics.history import RATE_STEPS, History
from counterpoint.job.reading.metrics.metrics_lines import Line
from counterpoint.job.reading.rollouts.rollout_records import dropped_records
from counterpoint.job.serving.service_state import service_in_words
from counterpoint.orchestrator.early_warnings.watch import SaidOfWarnings
from counterpoint.orchestrator.rollouts import branching
from counterpoint.orchestrator.rollouts.failures import failures_in_words, kind_of, sum_failures
from counterpoint.orchestrator.scheduling.lossless import ALLOWED, SaidOfStaleness
from counterpoint.orchestrator.scheduling.lossless import in_words as lost_in_words
from counterpoint.orchestrator.step.discarded import in_words
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable, shortened
from counterpoint.transport.process.exit_codes import is_explained
from counterpoint.transport.process.journal import prioritized
from counterpoint.transport.telemetry.agent_time import programs_share

HEARTBEAT_SECONDS = 15.0
"""Longest silence of the plain lines."""

LASTING_SECONDS = 1.0
"""A status of a worker that starts is a line of its own once it has lasted so long."""

FILTERED_SHARE = 0.5
"""The share of a step's completed rollouts from which on its line says how many were filtered."""

PROGRAMS_SHARE = 0.5
"""The share of a rollout that agents' programs take without the model from which on a step's line says it."""

LATE_SECONDS = 0.1
"""A step's line shows the event loop's lag if its maximum is above this."""

NO_DIFFERENCE = "no difference"
"""What is said of a run of which nothing is learned."""

NOTICED_STEPS = 50
"""A run that alternates between learning and not is told again after so many steps, or once it lasts longer."""

MOST_EXAMPLES = 20
"""Rollouts that a job prints in full by itself."""

EXAMPLE_CHARACTERS = 1000
"""Characters of each text of such a rollout."""

LONGEST_AGAIN = 80
"""Characters of what a heartbeat says again of a worker."""

_NUMBER = re.compile(r"\d+")

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {
    State.READY: "green",
    State.STARTING: "yellow",
    State.RESTARTING: "yellow",
    State.EXITED: "yellow",
    State.FAILED: "red",
    State.STOPPING: "yellow",
}


LEGEND = (
    "of a step: trained N is the newest step that has changed the weights, and loss, entropy and mismatch KL (inference against "
    "trainer) are its; length is in tokens; staleness is the updates between the weights that wrote a token and its training; "
    f"tokens/s is over the newest {RATE_STEPS} steps"
)
"""Explains the words of `describe_step`; printed before the first of them."""


class ProgressDisplay(Protocol):
    """What shows a job."""

    def update(self, workers: list[WorkerView], fresh: list[tuple[History, Line]]) -> None:
        """Shows the workers' states and the new steps, each with its run. Called about twice a second."""

    def close(self) -> None:
        """Restores the terminal."""


def choose(console: Console, histories: dict[str, History], service: Path | None = None) -> ProgressDisplay:
    """Creates the progress that fits the console. `histories` are the runs' by id; guests may be added later.

    `service` is the directory of a job with a service for the Tinker SDK.
    """
    kind = LiveProgress if console.is_terminal else PlainProgress
    return kind(console, histories, service)


def describe_step(line: Line, history: History) -> str:
    """Describes a step in one line: what a researcher looks at, and of the rest what is out of the ordinary.

    Loss, entropy and mismatch KL are of the newest trained step, which is named if it is an earlier one.
    """
    failed, trained = int(line.get("rollouts/failed", 0)), history.last_trained
    allowed, allowed_before = (each.get(ALLOWED) for each in (line, history.shipped.get(line["step"] - 1, line)))
    words, late = failures_in_words(sum_failures([line])), line.get("event_loop_lag/max", 0.0)
    parts = [
        f"step {line['step']}/{history.steps or '?'}",
        f"reward {number(line.get('reward/mean'))}",
        f"failed {failed}{f': {words}' if words else ''}" if failed else "",
        _filtered(line),
        f"trained {trained['step']}" if trained and trained["step"] != line["step"] else "",
        f"loss {number(trained.get('loss'))}" if "loss" in trained else "",
        f"entropy {number(trained.get('entropy'))}" if "entropy" in trained else "",
        f"mismatch KL {scientific(trained.get('mismatch_kl'))}" if "mismatch_kl" in trained else "",
        f"length {number(line['length/mean'], 0)}" if "length/mean" in line else "",
        f"staleness {number(line.get('staleness/mean'), 1)}",
        f"max_off_policy_steps {allowed}, so that slow rollouts are kept"
        if allowed_before and allowed > allowed_before
        else "",
        f"agents' own time {own:.0%} of a rollout" if (own := programs_share(line)) >= PROGRAMS_SHARE else "",
        f"lag max {milliseconds(late)}" if late > LATE_SECONDS else "",
        f"{number(history.tokens_per_second(), 0)} tokens/s",
        f"{number(history.seconds_of(line['step']), 1)} s",
    ]
    return "  ".join(part for part in parts if part)


def _filtered(line: Line) -> str:
    """Says of a step of which filters left a small part, how much they took: the next step needs as many rollouts again."""
    completed, caught = line.get("rollouts/completed", 0), line.get("rollouts/filtered", 0)
    if not completed or caught < FILTERED_SHARE * completed:
        return ""
    kinds = {name.split("/")[1] for name in line if name.startswith("filters/") and line[name] and name.count("/") > 1}
    by = f" by {', '.join(sorted(kinds))}" if kinds else ""
    return f"filtered {caught / completed:.0%} of {completed:.0f} rollouts{printable(by)}"


def describe_worker(worker: WorkerView) -> str:
    """Describes a worker's state: `inference_0 starting for 12 s (loading)`."""
    notes = "; ".join(note for note in (worker.trouble, worker.status) if note)
    status = f" ({notes})" if notes else ""
    return f"{worker.name} {worker.state} for {duration(time.time() - worker.since)}{status}"


class DroppedExamples:
    """Prints one rollout in full where a run says for the first time why it learns nothing, with the reason before it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: set[tuple[str, str]] = set()
        """Runs, and what was said of each."""

    def print_new(self, history: History) -> None:
        """Prints what is new about a run."""
        alike, report = history.no_difference is not None, history.discarded
        if not (alike or report.get("notable")):
            return
        said = history.run_id, NO_DIFFERENCE if alike else kind_of(str(report.get("failure") or report.get("reason")))
        if said in self._shown or len(self._shown) >= MOST_EXAMPLES:
            return
        self._shown.add(said)
        if not alike:
            line = f"run {history.run_id}: {printable(in_words(report))}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        try:
            records = dropped_records(history.job, history.run_id)
        except (UserError, OSError):
            return  # a guest's file; whoever asks for it is told
        for record in records[:1]:
            print_rollout(
                self._console, f"run {history.run_id}, of a dropped group", record, longest=EXAMPLE_CHARACTERS
            )


class PlainProgress:
    """Prints a line for every change of a worker's state and every step, and at least one every `HEARTBEAT_SECONDS`."""

    def __init__(self, console: Console, histories: dict[str, History], service: Path | None = None) -> None:
        """As `choose`."""
        self._console = console
        self._histories = histories
        self._service = service
        self._shown: dict[str, WorkerView] = {}
        """The workers as last shown, by name."""
        self._statuses: dict[str, str] = {}
        """The status that each worker last printed while it was starting, by name."""
        self._said_at: dict[str, float] = {}
        """The time of each worker's last status, on the monotonic clock, by name."""
        self._started: dict[str, float] = {}
        """The time when each worker last began to start, in Unix seconds, by name."""
        self._noticed: dict[str, tuple[int, int]] = {}
        """The groups without a difference of the notice that was last printed, and the step then, by run."""
        self._said: dict[str, tuple[SaidOfStaleness, branching.SaidOfBranches, SaidOfWarnings]] = {}
        """What was said of each run's lost rollouts, of its samples, and of what goes wrong."""
        self._told: dict[str, str] = {}
        """What the newest heartbeat said of each worker, by name."""
        self._dropped = DroppedExamples(console)
        self._results: dict[str, list[Evaluated]] = {}
        """The results of evaluations that the last update printed, by run."""
        self._last_line = time.monotonic()
        self._explained = False
        """Whether the words of a step's line were explained."""

    def update(self, workers: list[WorkerView], fresh: list[tuple[History, Line]]) -> None:
        """Prints what has changed."""
        for worker in workers:
            self._print_changes(worker)
        for history, line in fresh:
            if not self._explained:
                self._explained = True
                self._print(LEGEND)
            self._print(self._run_column(history) + describe_step(line, history))
        for history in self._histories.values():
            if history.new_results is not self._results.get(history.run_id):  # another look than the last one
                for result in history.new_results:
                    self._print(self._run_column(history) + printable(str(result)))
            self._results[history.run_id] = history.new_results
            self._print_notice(history)
            nothing = SaidOfStaleness(), branching.SaidOfBranches(), SaidOfWarnings()
            for said in self._said.setdefault(history.run_id, nothing):
                if news := said.news(history.last_shipped):
                    self._print(f"{self._run_column(history)}{printable(news)}", logging.WARNING)
            self._dropped.print_new(history)
        if time.monotonic() - self._last_line > HEARTBEAT_SECONDS:
            self._print_heartbeat(workers)

    def close(self) -> None:
        """Does nothing: there is nothing to restore."""

    @property
    def _has_several_runs(self) -> bool:
        return len(self._histories) > 1

    def _run_column(self, history: History) -> str:
        width = max(map(len, self._histories), default=0)
        return f"{history.run_id:<{width}}  " if self._has_several_runs else ""

    def _print_changes(self, worker: WorkerView) -> None:
        before = self._shown.get(worker.name)
        if before is None or before.state is not worker.state:
            is_bad = worker.state in (State.RESTARTING, State.EXITED, State.STUCK, State.FAILED)
            is_late = worker.state is State.STOPPING and worker.last_death.startswith(NOT_READY)
            doing = f": it {worker.last_death}" + (f" ({worker.status})" if worker.status else "") if is_late else ""
            level = logging.ERROR if is_bad or is_late else logging.INFO
            told = before.trouble if before is not None else ""
            self._print(f"{self._describe_change(worker, told)}{doing}", level)
        is_over = not worker.trouble and worker.state not in (State.READY, State.STARTING)  # it ended, or is about to
        if worker.trouble != (before.trouble if before is not None else "") and not is_over:
            level = logging.WARNING if worker.trouble else logging.INFO
            self._print(f"{worker.name}: {worker.trouble or 'the problem is over'}", level)
        if before is None or before.status != worker.status:
            self._said_at[worker.name] = time.monotonic()
        is_new_status = worker.status not in ("", self._statuses.get(worker.name))
        lasts = time.monotonic() - self._said_at[worker.name] >= LASTING_SECONDS
        if worker.state is State.STARTING and is_new_status and lasts:
            self._statuses[worker.name] = worker.status
            self._print(f"{worker.name}: {worker.status}")
        self._shown[worker.name] = worker

    def _print_notice(self, history: History) -> None:
        """Says that a run's groups show no difference, if more of them do than it last said, or many steps ago."""
        if history.no_difference is None:
            return
        groups, (told, step) = history.no_difference.groups, self._noticed.get(history.run_id, (0, 0))
        is_first = not told or history.step >= step + NOTICED_STEPS
        if is_first or groups > told:
            said = history.advice_without_difference if is_first else f"{history.no_difference}"
            self._print(f"{self._run_column(history)}{printable(said)}", logging.WARNING)
            self._noticed[history.run_id] = groups, history.step

    def _print_heartbeat(self, workers: list[WorkerView]) -> None:
        several = self._has_several_runs
        shown = [worker for worker in workers if not several or worker.state is not State.READY] or workers[:1]
        steps = ", ".join(
            f"{f'{history.run_id} ' if several else ''}step {history.progress}" for history in self._histories.values()
        )
        served = service_in_words(self._service) if self._service is not None else ""
        doing = "; ".join(each for each in (steps, served) if each)
        self._print(f"... {doing or 'no run'}; " + ", ".join(map(self._describe_again, shown)))

    def _describe_again(self, worker: WorkerView) -> str:
        """Describes a worker as `describe_worker`; what the last such line said with other numbers is shortened."""
        said = _NUMBER.sub("N", worker.trouble + worker.status)
        if said == self._told.get(worker.name):
            worker = replace(worker, trouble="", status=shortened(worker.status or worker.trouble, LONGEST_AGAIN))
        self._told[worker.name] = said
        return describe_worker(worker)

    def _describe_change(self, worker: WorkerView, told: str) -> str:
        """Describes a worker in a new state; `told` is the trouble of which it told last."""
        if worker.state is State.STARTING:
            self._started[worker.name] = worker.since
        if worker.state is State.READY and worker.name in self._started:
            is_new = worker.status not in ("", self._statuses.get(worker.name))
            status = f": {worker.status}" if is_new else ""  # of `serve`, its address
            return f"{worker.name} ready after {duration(worker.since - self._started[worker.name])}{status}"
        if worker.state in (State.RESTARTING, State.EXITED, State.FAILED) and worker.last_death:
            if is_explained(worker.last_death):
                return f"{worker.name} {worker.state}: it {worker.last_death}"
            output = f"last line of its output: {worker.last_output}" if worker.last_output else ""
            why = "".join(f"; {each}" for each in (told, output) if each)
            return f"{worker.name} {worker.last_death}: {worker.state}{why}"
        return f"{worker.name} {worker.state}"

    def _print(self, text: str, level: int = logging.INFO) -> None:
        """Prints a line. `level`, one of `logging`, is for systemd's journal."""
        self._last_line = time.monotonic()
        line = prioritized(f"{time.strftime('%H:%M:%S')} {printable(text)}", level, cast(TextIO, self._console.file))
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveProgress:
    """A panel that is redrawn in place.

    It has the workers and, of a single run, a bar, the newest numbers, and reward and lag as small curves; of several runs, a
    line each.
    """

    def __init__(self, console: Console, histories: dict[str, History], service: Path | None = None) -> None:
        """Starts the panel. As `choose`."""
        self._histories = histories
        self._service = service
        self._began = time.monotonic()
        self._dropped = DroppedExamples(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def update(self, workers: list[WorkerView], fresh: list[tuple[History, Line]]) -> None:
        """Redraws the panel."""
        if len(self._histories) == 1:
            (history,) = self._histories.values()
            panel = Group(self._workers(workers), self._bar(history), _numbers(history))
        else:
            panel = Group(self._workers(workers), _runs(self._histories), Text(duration(self._elapsed()), "dim"))
        if self._service is not None:
            panel.renderables.append(Text(printable(service_in_words(self._service))))
        for history in self._histories.values():
            if advice := history.advice_without_difference:
                panel.renderables.append(Text(printable(f"run {history.run_id}: {advice}"), "yellow"))
            warned = map(str, history.early_warnings)
            for words in (lost_in_words(history.last_shipped), branching.in_words([history.last_shipped]), *warned):
                if words:
                    panel.renderables.append(Text(printable(f"run {history.run_id}: {words}"), "yellow"))
            self._dropped.print_new(history)
        self._live.update(panel, refresh=True)

    def close(self) -> None:
        """Removes the panel."""
        self._live.stop()

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _workers(self, workers: list[WorkerView]) -> Text:
        text = Text()
        for worker in workers:
            text.append("● ", COLOURS.get(worker.state, "dim"))
            text.append(f"{worker.name} {worker.state}", "bold" if worker.state in COLOURS else "dim")
            waiting = worker.state in {State.STARTING, State.STOPPING, State.RESTARTING, State.EXITED}
            text.append(f" {duration(time.time() - worker.since)}  " if waiting else "  ")
            if worker.restarts:
                text.append(f"restarted {worker.restarts} times, it {worker.last_death}  ", "yellow")
            if worker.trouble:
                text.append(f"{worker.trouble}  ", "red")
            if worker.status:
                text.append(f"{worker.status}  ", "dim")
        return text

    def _bar(self, history: History) -> Table:
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(history.steps, history.step, width=50)
        row.add_row(bar, f"step {history.progress}", duration(self._elapsed()))
        return row


def _numbers(history: History) -> Table:
    line, trained = history.last_shipped, history.last_trained
    grid = Table.grid(padding=(0, 2))
    grid.add_row("reward", number(line.get("reward/mean")), _curve(history, "reward/mean"))
    for result in history.evaluations.newest.values():
        shown = ", ".join(f"{metric} {each}" for metric, each in result.metrics.items())
        grid.add_row(Text(printable(result.name)), f"step {result.step}", Text(printable(shown)))
    lag = f"p99 {milliseconds(line.get('event_loop_lag/p99'))}"
    grid.add_row("loop lag", lag, _curve(history, "event_loop_lag/p99"))
    grid.add_row("mismatch KL", scientific(trained.get("mismatch_kl")), _curve(history, "mismatch_kl"))
    rate = number(history.tokens_per_second(), 0)
    grid.add_row(
        "tokens/s", rate, f"staleness {number(line.get('staleness/mean'), 1)}, trained {trained.get('step', 0)}"
    )
    return grid


def _runs(histories: dict[str, History]) -> Table:
    """A line for each run."""
    grid = Table.grid(padding=(0, 2))
    for history in histories.values():
        line = history.last_shipped
        grid.add_row(
            Text(history.run_id, "bold"),
            ProgressBar(history.steps, history.step, width=16),
            f"step {history.progress}",
            f"reward {number(line.get('reward/mean'))}",
            _curve(history, "reward/mean", width=24),
            f"lag p99 {milliseconds(line.get('event_loop_lag/p99'))}",
            f"staleness {number(line.get('staleness/mean'), 1)}",
            f"{number(history.tokens_per_second(), 0)} tokens/s",
        )
    return grid


def _curve(history: History, name: str, width: int = 48) -> Text:
    """The last values as a sparkline between their minimum and maximum."""
    values = [value for _, value in history.series(name)][-width:]
    if not values:
        return Text()
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return Text("".join(BARS[int((value - low) / span * (len(BARS) - 1))] for value in values), "cyan")
