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
from cli.load import read_toml
from cli.output import JOB_FILE, is_locked
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
    steps = _steps_of_runs(directory)
    histories = {run_id: History.of(directory, run_id) for run_id in steps}
    for history in histories.values():
        history.refresh()
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe has no width; 80 would cut columns off
    console.print(_runs(directory, histories, steps))
    for run_id, history in histories.items():
        if history.lost.get("notable"):
            _say(console, f"run {run_id}: {in_words(history.lost)}", "yellow")
    if offences := offences_of(line for history in histories.values() for line in history.shipped.values()).worst():
        console.print(blame_table(offences))
    recorded = _read(directory / "processes.json")
    if recorded is None:
        _say(console, "No processes are known: the roles were not started by `counterpoint run`.", "dim")
        return 0
    console.print(_processes(directory, recorded))
    for worker, line in _last_errors(directory, recorded).items():
        _say(console, f"last error of {worker}: {line}", "red")
    return 0


def _say(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _steps_of_runs(directory: Path) -> dict[str, int | None]:
    """The steps that each run is to have: the job's, or, where the roles were started one by one, as its orchestrator wrote."""
    if (job := _read(directory / JOB_FILE)) is not None:
        return {job["orchestrator"]["run_id"]: job["orchestrator"]["steps"]}
    steps: dict[str, int | None] = {}
    for run in sorted(directory.glob("run_*")):
        resolved = run / "control" / "orch.toml"
        if resolved.exists() or (run / "metrics.jsonl").exists():
            steps[run.name.removeprefix("run_")] = read_toml(resolved).get("steps") if resolved.exists() else None
    if not steps:
        raise UserError(f"{directory} holds neither a job ({JOB_FILE} is missing) nor a run (run_<id>/)")
    return steps


def _runs(directory: Path, histories: dict[str, History], steps: dict[str, int | None]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=str(directory), title_justify="left")
    for column in ("run", "step", "trained", "reward", "staleness", "lag p99", "lag max", "KL", "tokens/s"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run_id, history in histories.items():
        line, trained = history.last_shipped, history.last_trained
        table.add_row(
            run_id,
            f"{line.get('step', 0)}/{steps[run_id] or '?'}",
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


def _last_errors(directory: Path, recorded: dict[str, Any]) -> dict[str, str]:
    """The newest line that looks like an error, of each worker that was started in the newest session, in its output since then.
    What one that ended well wrote after it was told to is left out: vLLM calls every end an error."""
    logs = {"orchestrator": directory / "orchestrator.log", "trainer": directory / "trainer" / "trainer.log"}
    errors: dict[str, str] = {}
    for worker in recorded["workers"]:
        name, start = worker["name"], worker.get("log_from", 0)
        if start is None:
            continue
        end = worker.get("log_until") if worker["state"] in ("stopping", "stopped") else None
        lines = last_lines(logs.get(name, directory / f"{name}.log"), 500, start, end)
        if found := [line for line in lines if ERROR_LINE.search(line)]:
            errors[name] = found[-1]
    return errors


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return content
