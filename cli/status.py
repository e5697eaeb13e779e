"""`counterpoint status DIRECTORY`: what a job's directory says of it: its run, its steps, its processes, its last error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from cli.errors import UserError
from cli.history import History
from cli.output import JOB_FILE, is_locked
from cli.summary import milliseconds, number, scientific
from cluster.process import last_lines
from orchestrator.offences import offences_of
from perf.blame_table import blame_table

USAGE = """usage: counterpoint status DIRECTORY

DIRECTORY is a job's output directory."""

ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL|Error:|Exception:)|counterpoint: error")


def main(arguments: list[str]) -> int:
    """The command. 0 also for a job that failed: the question was answered."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    directory = Path(arguments[0])
    job = _read(directory / JOB_FILE)
    if job is None:
        raise UserError(f"{directory} holds no job: {JOB_FILE} is missing")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe has no width; 80 would cut columns off
    history = History.of(directory, job["orchestrator"]["run_id"])
    history.refresh()
    console.print(_runs(directory, job, history))
    if offences := offences_of(history.shipped.values()).worst():
        console.print(blame_table(offences))
    console.print(_processes(directory))
    for worker, line in _last_errors(directory).items():
        console.print(f"last error of {worker}: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    return 0


def _runs(directory: Path, job: dict[str, Any], history: History) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=str(directory), title_justify="left")
    for column in ("run", "step", "trained", "reward", "staleness", "lag p99", "lag max", "KL", "tokens/s"):
        table.add_column(column, justify="left" if column == "run" else "right")
    orchestrator = job["orchestrator"]
    line, trained = history.last_shipped, history.last_trained
    table.add_row(
        orchestrator["run_id"],
        f"{line.get('step', 0)}/{orchestrator['steps']}",
        str(trained.get("step", 0)),
        number(line.get("reward/mean")),
        number(line.get("staleness/mean"), 1),
        milliseconds(line.get("event_loop_lag/p99")),
        milliseconds(line.get("event_loop_lag/max")),
        scientific(trained.get("mismatch_kl")),
        number(history.tokens_per_second(steps=10), 0),
    )
    return table


def _processes(directory: Path) -> Table:
    """The workers as the supervisor recorded them; all gone if it is gone, since none outlives it."""
    recorded = _read(directory / "processes.json") or {"workers": []}
    running = is_locked(directory)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("process", "state", "pid", "alive", "says"):
        table.add_column(column)
    for worker in recorded["workers"]:
        pid = worker["pid"]
        alive = running and pid is not None and Path(f"/proc/{pid}").exists()
        last_state = worker["state"] if running or pid is None else f"was {worker['state']}"
        table.add_row(worker["name"], last_state, str(pid or "-"), "yes" if alive else "no", worker["status"])
    return table


def _last_errors(directory: Path) -> dict[str, str]:
    """The newest line of each worker's output that looks like an error."""
    logs = {"orchestrator": directory / "orchestrator.log", "trainer": directory / "trainer" / "trainer.log"}
    logs |= {path.stem: path for path in sorted(directory.glob("inference_*.log"))}
    errors: dict[str, str] = {}
    for worker, path in logs.items():
        found = [line for line in last_lines(path, 500) if ERROR_LINE.search(line)]
        if found:
            errors[worker] = found[-1]
    return errors


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return content
