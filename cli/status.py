"""`counterpoint status DIRECTORY`: what a job's directory says of it: runs, how they stand, processes, last errors."""

from __future__ import annotations

import argparse
import json
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.display.blame_table import blame_table
from cluster.process import last_lines
from job.directory import (
    JOB_FILE,
    PROCESSES_FILE,
    is_running,
    orchestrator_of,
    own_runs,
    read_json,
    run_ids_in,
    steps_of,
)
from job.errors import UserError
from job.history import History
from job.run_state import verdict_on
from job.summary import milliseconds, number, scientific
from job.why import DROPPED, explain
from job.why import in_words as decision_in_words
from orchestrator.loop_health.slow_spots import slow_spots_of
from orchestrator.rollouts.failures import failures_in_words, sum_failures
from orchestrator.step.discarded import in_words
from orchestrator.step.phases import phases_in_words, sum_phases
from transport.printable import printable

WATCH_SECONDS = 2.0
"""Between two updates of `--watch`."""

ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL|Error:|Exception:)|counterpoint: error")


def main(arguments: list[str]) -> int:
    """The command. 0 also for a job that failed: the question was answered."""
    given = _parser().parse_args(arguments)
    if given.why is not None:
        return _why(given.directory, given.why, given.json)
    if given.watch:
        return _watch(given.directory, given.json)
    found = look(given.directory)
    if given.json:
        print(json.dumps(found.as_json(), indent=1))
        return 0
    console = _console()
    for part in found.parts():
        console.print(part, soft_wrap=isinstance(part, Text))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint status",
        description="Prints a job's state from its output directory, also if its roles were started one by one.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for programs; with --watch, one per line"
    )
    parser.add_argument(
        "--why",
        metavar="GROUP",
        help=f"print what happened to a group of rollouts (12, or a rollout of it: 12-3) and why it was dropped; `{DROPPED}` "
        "prints the newest dropped groups",
    )
    parser.add_argument("--watch", action="store_true", help=f"print again every {WATCH_SECONDS:g} s, until Ctrl-C")
    return parser


def _why(directory: Path, name: str, as_json: bool) -> int:
    found = explain(directory, name)
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    console = _console()
    for run_id, lines in found.items():
        title = f"run {run_id}" if name == DROPPED else f"run {run_id}, group {name.partition('-')[0]}"
        for text in (title, *(f"  {decision_in_words(line, name == DROPPED)}" for line in lines)):
            console.print(printable(text), highlight=False, soft_wrap=True)
    return 0


def _console() -> Console:
    console = Console(markup=False)
    return (
        console if console.is_terminal else Console(width=120, markup=False)
    )  # a pipe has no width; 80 would cut columns off


def _watch(directory: Path, as_json: bool) -> int:
    """Prints the state again and again until Ctrl-C: in place on a terminal, otherwise one after the other."""
    console = _console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    try:
        with live or nullcontext():
            while True:
                found = look(directory)
                if as_json:
                    print(json.dumps(found.as_json()), flush=True)
                elif live is not None:
                    live.update(Group(*found.parts()), refresh=True)
                else:
                    console.print(*found.parts(), sep="\n", soft_wrap=True)
                time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return 0


@dataclass(frozen=True, slots=True)
class Look:
    """A job's directory as it was found."""

    directory: Path
    own: dict[str, int] | None
    """The steps of each run that the job itself has; None where there is no job, and the roles were started one by one."""
    histories: dict[str, History]
    recorded: dict[str, Any]
    """What `processes.json` holds."""
    running: bool
    """Whether `counterpoint run` is at work there."""

    def parts(self) -> list[RenderableType]:
        """The parts to print, from top to bottom."""
        parts: list[RenderableType] = [_runs(self.directory, self.histories, self.own)]
        for run_id, history in self.histories.items():
            if (verdict := verdict_on(self.directory / f"run_{run_id}")) is not None:
                parts.append(_text(f"run {run_id} {verdict}", "red"))
            if history.unreadable:
                parts.append(_text(f"run {run_id} cannot be read: {history.unreadable}", "red"))
            if phases := phases_in_words(sum_phases([history.last_shipped])):
                parts.append(_text(f"run {run_id} step {history.step}: {phases}", "dim"))
            if failed := failures_in_words(sum_failures([*history.shipped.values(), history.discarded])):
                parts.append(_text(f"run {run_id} failed rollouts: {failed}", "yellow"))
            if unanswered := _count(history, "rollouts/inference_failed"):
                parts.append(_text(f"run {run_id} rollouts without an answer from inference: {unanswered}", "yellow"))
            if history.discarded.get("notable"):
                parts.append(_text(f"run {run_id}: {in_words(history.discarded)}", "yellow"))
        lines = (line for history in self.histories.values() for line in history.shipped.values())
        if slow_spots := slow_spots_of(lines).worst():
            parts.append(blame_table(slow_spots))
        if not self.recorded["workers"]:
            return [*parts, Text("No processes are known: the roles were not started by `counterpoint run`.", "dim")]
        errors = [_text(f"last error of {name}: {line}", "red") for name, line in self.last_errors().items()]
        return [*parts, _processes(self), *errors]

    def last_errors(self) -> dict[str, str]:
        """The newest line that looks like an error, by the name of the worker or the guest's run."""
        guests = {run_id for run_id in self.histories if self.own is not None and run_id not in self.own}
        return _last_errors(self.directory, self.recorded) | _last_errors_of_guests(self.directory, guests)

    def is_alive(self, worker: dict[str, Any]) -> bool:
        """Whether a recorded process lives: none outlives its supervisor."""
        return self.running and worker["pid"] is not None and Path(f"/proc/{worker['pid']}").exists()

    def as_json(self) -> dict[str, Any]:
        """The numbers of the tables for programs, each under its metric's name; unknown ones are absent."""
        return {
            "directory": str(self.directory),
            "running": self.running,
            "runs": [_run_as_json(self, history) for history in self.histories.values()],
            "processes": [{**worker, "alive": self.is_alive(worker)} for worker in self.recorded["workers"]],
            "last_errors": self.last_errors() if self.recorded["workers"] else {},
        }


SHIPPED = ("reward/mean", "staleness/mean", "event_loop_lag/p99", "event_loop_lag/max")


def _run_as_json(found: Look, history: History) -> dict[str, Any]:
    metrics = {name: history.last_shipped[name] for name in SHIPPED if name in history.last_shipped}
    metrics |= {name: history.last_trained[name] for name in ("mismatch_kl",) if name in history.last_trained}
    return {
        "run_id": history.run_id,
        "state": _state(found.directory, history, found.own),
        "verdict": verdict_on(found.directory / f"run_{history.run_id}"),
        "step": history.step,
        "steps": history.steps,
        "trained": history.last_trained.get("step", 0),
        "tokens_per_second": history.tokens_per_second(steps=10),
        "discarded": history.discarded or None,
        "failures": sum_failures([*history.shipped.values(), history.discarded]),
        "inference_failed": _count(history, "rollouts/inference_failed"),
        "phase_seconds": sum_phases([history.last_shipped]),
        "metrics": metrics,
    }


def look(directory: Path) -> Look:
    """What the directory says now. Raises `UserError` where there is neither a job nor a run."""
    own = _runs_of_job(directory)
    histories = _histories(directory, own)
    recorded = read_json(directory / PROCESSES_FILE) if (directory / PROCESSES_FILE).exists() else {"workers": []}
    return Look(directory, own, histories, recorded, is_running(directory))


def _runs_of_job(directory: Path) -> dict[str, int] | None:
    """The steps of each run that the job itself has; None where there is no job, and the roles were started one by one."""
    if not (directory / JOB_FILE).exists():
        return None
    return {run["run_id"]: run["steps"] for run in own_runs(read_json(directory / JOB_FILE))}


def _histories(directory: Path, own: dict[str, int] | None) -> dict[str, History]:
    """Of the job's runs, and of those that others started in its directory."""
    others = [
        run_id
        for run_id in run_ids_in(directory)
        if run_id not in (own or {})
        and any((directory / f"run_{run_id}" / name).exists() for name in ("control/orch.toml", "metrics.jsonl"))
    ]
    if own is None and not others:
        raise UserError(f"{directory} holds neither a job ({JOB_FILE} is missing) nor a run (run_<id>/)")
    steps: dict[str, int | None] = {**(own or {}), **{run_id: steps_of(directory, run_id) for run_id in others}}
    histories = {run_id: History.of(directory, run_id, count) for run_id, count in steps.items()}
    for history in histories.values():
        history.refresh()
    return histories


def _state(directory: Path, history: History, own: dict[str, int] | None) -> str:
    """In a word or two: whether the run goes on, and if not, why."""
    verdict = verdict_on(directory / f"run_{history.run_id}")
    if orchestrator_of(directory, history.run_id) is not None:
        begun = "running" if history.step or verdict else "not begun"
        return f"{begun}, guest" if own is not None and history.run_id not in own else begun
    if verdict is not None:
        return verdict.partition(":")[0]
    return "done" if history.complete else "not running"


def _runs(directory: Path, histories: dict[str, History], own: dict[str, int] | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=str(directory), title_justify="left")
    for column in ("run", "state", "step", "trained", "reward", "staleness", "lag p99", "lag max", "KL", "tokens/s"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right")
    for run_id, history in histories.items():
        line, trained = history.last_shipped, history.last_trained
        table.add_row(
            run_id,
            _state(directory, history, own),
            history.so_far,
            str(trained.get("step", 0)),
            number(line.get("reward/mean")),
            number(line.get("staleness/mean"), 1),
            milliseconds(line.get("event_loop_lag/p99")),
            milliseconds(line.get("event_loop_lag/max")),
            scientific(trained.get("mismatch_kl")),
            number(history.tokens_per_second(steps=10), 0),
        )
    return table


def _processes(found: Look) -> Table:
    """The workers as the supervisor recorded them; all gone if it is gone, since none outlives it."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("process", "state", "pid", "alive", "restarts", "says"):
        table.add_column(column)
    for worker in found.recorded["workers"]:
        pid = worker["pid"]
        alive = "yes" if found.is_alive(worker) else "no"
        last_state = worker["state"] if found.running or pid is None else f"was {worker['state']}"
        says = "; ".join(word for word in (worker.get("trouble"), worker["status"]) if word)
        restarts = f"{worker['restarts']}, it {worker['last_death']}" if worker.get("restarts") else "-"
        table.add_row(worker["name"], last_state, str(pid or "-"), alive, printable(restarts), printable(says))
    return table


def _count(history: History, name: str) -> int:
    """The sum of a metric over all shipped steps and what the run has discarded since."""
    return int(sum(line.get(name, 0) for line in [*history.shipped.values(), history.discarded]))


def _text(words: str, style: str) -> Text:
    """Of words that may be a guest's, or a log's."""
    return Text(printable(words), style)


def _last_errors(directory: Path, recorded: dict[str, Any]) -> dict[str, str]:
    """The newest line that looks like an error, of each worker that was started in the newest session, in its output since then.
    What one that ended well wrote after it was told to is left out: vLLM calls every end an error."""
    errors: dict[str, str] = {}
    for worker in recorded["workers"]:
        name, start = worker["name"], worker.get("log_from", 0)
        if start is None:
            continue
        end = worker.get("log_until") if worker["state"] in ("stopping", "stopped") else None
        log_file = directory / ("trainer/trainer.log" if name == "trainer" else f"{name}.log")
        if error := _last_error(log_file, start, end):
            errors[name] = error
    return errors


def _last_errors_of_guests(directory: Path, guests: set[str]) -> dict[str, str]:
    """Of runs whose process's output is not ours to know; their own log is."""
    logs = {f"run {run_id}": directory / f"run_{run_id}" / "orchestrator.log" for run_id in sorted(guests)}
    return {name: error for name, log in logs.items() if (error := _last_error(log))}


def _last_error(log_file: Path, start: int = 0, end: int | None = None) -> str | None:
    return next((line for line in reversed(last_lines(log_file, 500, start, end)) if ERROR_LINE.search(line)), None)
