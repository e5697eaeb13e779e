"""Prints the status of a job of roles, for `counterpoint status DIRECTORY`.

What workers say of themselves is escaped, and markup in it is not interpreted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from counterpoint.cli.cluster.wait import job_in
from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_status import JobStatus, WorkerStatus
from counterpoint.cluster.master.control import NoMaster
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable

COLUMNS = ("worker", "stage", "phase", "incarnation", "node", "pid", "restarts", "status")
NUMBERS = ("incarnation", "pid", "restarts")
STYLES = {"RUNNING": "green", "FAILED": "red"}


def read_parts(directory: Path) -> list[RenderableType]:
    """Returns the parts to print. Raises `UserError` if there is no such job, or its files are damaged."""
    handle = job_in(directory)
    try:
        return job_parts(handle.status(), handle.directory)
    except NoMaster as error:
        advice = f"`counterpoint wait {directory}` starts another master, which goes on with the job"
        return [Text(f"{handle.spec.name}: {printable(str(error))}\n{advice}", "red")]
    except ClusterError as error:
        raise UserError(str(error)) from None


def read_json(directory: Path) -> dict[str, Any]:
    """Returns the status for programs. Raises as `read_parts`, also `UserError` if no master answers."""
    try:
        return job_in(directory).status().as_json()
    except ClusterError as error:
        raise UserError(str(error)) from None


def job_parts(status: JobStatus, directory: Path) -> list[RenderableType]:
    """Returns the parts to print, from top to bottom."""
    parts: list[RenderableType] = [_workers(status, directory)]
    if status.trouble:
        parts.append(_text(status.trouble, "red"))
    for worker in status.workers:
        if worker.trouble:
            parts.append(_text(f"{worker.worker}: {worker.trouble}", "yellow"))
        if worker.last_death:
            parts.append(_text(f"last death: {worker.worker} {worker.last_death} (log: {worker.log})", "red"))
    if status.outcome is not None:
        style = "green" if status.outcome.code == 0 else "red"
        parts.append(_text(f"ended with exit code {status.outcome.code}: {status.outcome.reason}", style))
    return parts


def _workers(status: JobStatus, directory: Path) -> Table:
    """The workers, role by role in the order of the spec."""
    title = f"job {status.job}: {status.stage}, epoch {status.epoch}, in {directory}"
    table = Table(box=box.SIMPLE_HEAD, title=_text(title), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in NUMBERS else "left", no_wrap=column == "worker")
    for worker in status.workers:
        table.add_row(*_row(worker))
    return table


def _row(worker: WorkerStatus) -> list[Text]:
    return [
        _text(worker.worker),
        _text(worker.stage, STYLES.get(worker.stage, "")),
        _text(worker.phase),
        _text(str(worker.incarnation or "-")),
        _text(worker.node or "-"),
        _text(str(worker.pid or "-")),
        _text(str(worker.restarts or "-")),
        _text(worker.status),
    ]


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)
