"""Progress of a job for whoever started it: a live panel on a terminal, plain lines elsewhere; in neither a silent minute."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.history import History, Line
from cli.summary import duration, milliseconds, number, scientific
from cluster.job import WorkerView
from cluster.lifecycle import State

HEARTBEAT_SECONDS = 15.0
"""Longest silence of the plain lines."""

RECENT_STEPS = 10
"""Steps over which tokens/s is shown."""

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {State.READY: "green", State.STARTING: "yellow", State.FAILED: "red", State.STOPPING: "yellow"}


class Progress(Protocol):
    """What `run` needs of either."""

    def update(self, workers: list[WorkerView], fresh: list[Line]) -> None:
        """Shows the workers as they are and the steps that are new. Called about twice a second."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


def choose(console: Console, history: History, steps: int) -> Progress:
    """Live on a terminal, plain elsewhere."""
    return LiveProgress(console, history, steps) if console.is_terminal else PlainProgress(console, history, steps)


def describe_step(line: Line, history: History, steps: int) -> str:
    """One step in one line."""
    failed = int(line.get("rollouts/failed", 0))
    return (
        f"step {line['step']}/{steps}  reward {number(line.get('reward/mean'))}  "
        f"{f'failed {failed}  ' if failed else ''}"
        f"staleness {number(line.get('staleness/mean'), 1)}  lag p99 {milliseconds(line.get('event_loop_lag/p99'))} "
        f"max {milliseconds(line.get('event_loop_lag/max'))}  "
        f"{number(history.tokens_per_second(steps=RECENT_STEPS), 0)} tokens/s  "
        f"trained {max(history.trained, default=0)}  mismatch KL {scientific(history.last_trained.get('mismatch_kl'))}"
    )


def describe_worker(worker: WorkerView) -> str:
    """A worker's state in words: `inference_0 starting for 12 s (loading)`."""
    status = f" ({worker.status})" if worker.status else ""
    return f"{worker.name} {worker.state} for {duration(time.time() - worker.since)}{status}"


class PlainProgress:
    """A line for every change of a worker's state and every step, and a heartbeat."""

    def __init__(self, console: Console, history: History, steps: int) -> None:
        self._console = console
        self._history = history
        self._steps = steps
        self._states: dict[str, State] = {}
        self._started: dict[str, float] = {}
        self._last_line = time.monotonic()

    def update(self, workers: list[WorkerView], fresh: list[Line]) -> None:
        for worker in workers:
            if self._states.get(worker.name) is not worker.state:
                self._states[worker.name] = worker.state
                self._say(self._change(worker))
        for line in fresh:
            self._say(describe_step(line, self._history, self._steps))
        if time.monotonic() - self._last_line > HEARTBEAT_SECONDS:
            shipped = max(self._history.shipped, default=0)
            self._say(f"... step {shipped}/{self._steps}; " + ", ".join(map(describe_worker, workers)))

    def _change(self, worker: WorkerView) -> str:
        if worker.state is State.STARTING:
            self._started[worker.name] = worker.since
        if worker.state is State.READY and worker.name in self._started:
            return f"{worker.name} ready after {duration(worker.since - self._started[worker.name])}"
        return f"{worker.name} {worker.state}"

    def _say(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to undo."""


class LiveProgress:
    """A panel that is redrawn in place: the workers, a bar, the newest numbers, reward and lag as small curves."""

    def __init__(self, console: Console, history: History, steps: int) -> None:
        self._history = history
        self._steps = steps
        self._began = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def update(self, workers: list[WorkerView], fresh: list[Line]) -> None:
        self._live.update(Group(self._workers(workers), self._bar(), self._numbers()), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _workers(self, workers: list[WorkerView]) -> Text:
        text = Text()
        for worker in workers:
            text.append("● ", COLOURS.get(worker.state, "dim"))
            text.append(f"{worker.name} {worker.state}", "bold" if worker.state in COLOURS else "dim")
            waiting = worker.state in {State.STARTING, State.STOPPING}
            text.append(f" {duration(time.time() - worker.since)}  " if waiting else "  ")
            if worker.status:
                text.append(f"{worker.status}  ", "dim")
        return text

    def _bar(self) -> Table:
        shipped = max(self._history.shipped, default=0)
        row = Table.grid(padding=(0, 1))
        elapsed = duration(time.monotonic() - self._began)
        row.add_row(ProgressBar(self._steps, shipped, width=50), f"step {shipped}/{self._steps}", elapsed)
        return row

    def _numbers(self) -> Table:
        line, trained = self._history.last_shipped, self._history.last_trained
        grid = Table.grid(padding=(0, 2))
        grid.add_row("reward", number(line.get("reward/mean")), _curve(self._history, "reward/mean"))
        lag = f"p99 {milliseconds(line.get('event_loop_lag/p99'))}"
        grid.add_row("loop lag", lag, _curve(self._history, "event_loop_lag/p99"))
        grid.add_row("mismatch KL", scientific(trained.get("mismatch_kl")), _curve(self._history, "mismatch_kl"))
        rate = number(self._history.tokens_per_second(steps=RECENT_STEPS), 0)
        grid.add_row(
            "tokens/s", rate, f"staleness {number(line.get('staleness/mean'), 1)}, trained {trained.get('step', 0)}"
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
