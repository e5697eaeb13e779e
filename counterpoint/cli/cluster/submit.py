"""`counterpoint submit FILE`: starts the job of roles that a TOML file describes, and waits for its end."""

from __future__ import annotations

import argparse
from pathlib import Path

from counterpoint.cli.cluster.wait import StopJobOnSignals, await_end
from counterpoint.cluster.builder import load_spec
from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_handle import JobHandle, submit
from counterpoint.cluster.spec import JobSpec
from counterpoint.job.file_kind import other_kind
from counterpoint.transport.errors import UserError


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the job's exit code; with `--detach`, 0 once the master answers."""
    given = _parser().parse_args(arguments)
    with StopJobOnSignals() as signals:
        handle = _submitted(given)
        signals.attend(handle)
        if not given.detach or signals.count:
            return await_end(handle)
    directory = handle.directory
    print(f"job {handle.spec.name} runs in {directory}; counterpoint status, wait or stop {directory}")
    return 0


def _submitted(given: argparse.Namespace) -> JobHandle:
    try:
        spec = load_spec(given.file)
    except UserError:
        if (other := other_kind(given.file, JobSpec)) is not None:
            kind, taker = other
            raise UserError(f"{given.file}: this is a {kind} file: use `counterpoint {taker} {given.file}`") from None
        raise
    try:
        return submit(spec, given.directory or Path("outputs") / spec.name, given.backend)
    except (ClusterError, UserError) as error:
        raise UserError(f"{given.file}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint submit",
        description="Starts the job of roles in FILE, and waits for its end. Ctrl-C stops it; with --detach it runs on alone.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--directory", type=Path, metavar="DIRECTORY", help="the job's own directory (default: outputs/NAME of the job)"
    )
    parser.add_argument(
        "--backend",
        default="local",
        metavar="NAME",
        help="local, ray, or the import path of a class (default: %(default)s)",
    )
    parser.add_argument("--detach", action="store_true", help="return once the job's master answers")
    return parser
