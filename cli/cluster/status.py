"""Prints the status of a job of roles, for `counterpoint status DIRECTORY`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from cli.cluster.wait import job_in
from cli.display.cluster_table import job_parts
from cluster.errors import ClusterError
from cluster.master.control import NoMaster
from transport.errors import UserError
from transport.printable import printable


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
