"""`counterpoint status DIRECTORY`: what a job's directory says of it: runs, how they stand, processes, last errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cli.errors import UserError
from cli.history import History
from cli.record import JOB_FILE, PROCESSES_FILE, is_running, orchestrator_of, own_runs, read_json, run_ids_in, steps_of
from cli.standing import verdict_on
from cli.summary import milliseconds, number, scientific
from cluster.process import last_lines
from orchestrator.losses import in_words
from orchestrator.offences import offences_of
from perf.blame_table import blame_table

USAGE = """usage: counterpoint status DIRECTORY

DIRECTORY is a job's output directory, also where its roles were started one by one."""

ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL|Error:|Exception:)|counterpoint: error")


def main(arguments: list[str]) -> int:
    """The command. 0 also for a job that failed: the question was answered."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    directory = Path(arguments[0])
    own = _runs_of_job(directory)
    histories = _histories(directory, own)
    recorded = read_json(directory / PROCESSES_FILE) if (directory / PROCESSES_FILE).exists() else {"workers": []}
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe has no width; 80 would cut columns off
    console.print(_runs(directory, histories, own))
    for run_id, history in histories.items():
        if (verdict := verdict_on(directory / f"run_{run_id}")) is not None:
            _say(console, f"run {run_id} {verdict}", "red")
        if history.lost.get("notable"):
            _say(console, f"run {run_id}: {in_words(history.lost)}", "yellow")
    if offences := offences_of(line for history in histories.values() for line in history.shipped.values()).worst():
        console.print(blame_table(offences))
    if not recorded["workers"]:
        _say(console, "No processes are known: the roles were not started by `counterpoint run`.", "dim")
        return 0
    console.print(_processes(directory, recorded))
    guests = {run_id for run_id in histories if own is not None and run_id not in own}
    for name, line in (_last_errors(directory, recorded) | _last_errors_of_guests(directory, guests)).items():
        _say(console, f"last error of {name}: {line}", "red")
    return 0


def _say(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


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


def _processes(directory: Path, recorded: dict[str, Any]) -> Table:
    """The workers as the supervisor recorded them; all gone if it is gone, since none outlives it."""
    running = is_running(directory)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("process", "state", "pid", "alive", "restarts", "says"):
        table.add_column(column)
    for worker in recorded["workers"]:
        pid = worker["pid"]
        alive = running and pid is not None and Path(f"/proc/{pid}").exists()
        last_state = worker["state"] if running or pid is None else f"was {worker['state']}"
        restarts = f"{worker['restarts']}, it {worker['last_death']}" if worker.get("restarts") else "-"
        table.add_row(worker["name"], last_state, str(pid or "-"), "yes" if alive else "no", restarts, worker["status"])
    return table


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
