"""`counterpoint track`: sends a job's metrics to TensorBoard, Trackio or W&B, while it runs or afterwards."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from counterpoint.cli.arguments.command import log_to_stderr
from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.job.directory import JOB_FILE, is_running, living_runs, read_json, run_ids_in
from counterpoint.job.tracking.config import TrackingConfig
from counterpoint.job.tracking.rows import SinkSpec
from counterpoint.job.tracking.sinks_of import SINKS, check_extras, sinks_of
from counterpoint.job.tracking.tracking import Tracking
from counterpoint.transport.configuration.explain import validate
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.notify import Heartbeat, notify_ready

LOOK_SECONDS = 2.0

TRAINED = "trainer/metrics.jsonl"
"""What supervised fine-tuning alone leaves."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 0, or 1 if a sink lacks something."""
    given = _parser().parse_args(arguments)
    given.job = job_of(given)
    if not run_ids_in(given.job) and not any((given.job / name).exists() for name in (JOB_FILE, TRAINED)):
        raise UserError(f"{given.job} holds no job; expected the output directory of one")
    tracking = _tracking(given)
    check_extras(tracking)
    specs = sinks_of(tracking, given.job)
    if not specs:
        raise UserError(
            f"{given.job / JOB_FILE} has no sink in [tracking]; say where to with --to, one of: {', '.join(SINKS)}"
        )
    log_to_stderr()
    return _run(specs, given.job, given.follow)


def _run(specs: list[SinkSpec], directory: Path, follow: bool) -> int:
    tracking = Tracking(specs)
    stopped = False
    heartbeat, looked = Heartbeat(), 0.0
    ended = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    def over() -> bool:
        nonlocal looked, ended
        if not follow and time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            ended = not is_running(directory) and not living_runs(directory)
        return stopped or ended

    def watch(trouble: str) -> None:
        heartbeat.report(trouble)
        heartbeat.beat()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    notify_ready()
    with redirect_stdout(sys.stderr):  # for whatever a library prints
        lacking = tracking.run(over, watch, hurry=lambda: stopped)
    for spec in specs:
        if spec.name not in lacking:
            place = spec.options.get("directory") or directory / "tracking" / spec.name
            shown = f"; tensorboard --logdir {shlex.quote(str(place))}" if spec.name == "tensorboard" else ""
            print(f"{spec.name} has all of {directory}{shown}")
    if lacking:  # a library that hangs would hold up the end of the process as well
        sys.stdout.flush()
        os._exit(0 if stopped else 1)
    return 0


def _tracking(given: argparse.Namespace) -> TrackingConfig:
    """What the job's file says, or, with `--to`, the command line."""
    if not given.to:
        content = read_json(given.job / JOB_FILE) if (given.job / JOB_FILE).exists() else {}
        table: Any = content.get("tracking") or {}
    else:
        project = {"project": given.project} if given.project else {}
        mode = {"mode": "offline" if given.offline else "online"}
        own = {"tensorboard": {}, "trackio": project, "wandb": project | mode}
        table = {name: own[name] for name in given.to}
    if given.name:
        table |= {"name": given.name}
    return validate(TrackingConfig, table, origin=str(given.job / JOB_FILE))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint track",
        description="Sends the metrics of all runs of the job: those that it has, and those that follow while it runs. What a "
        "sink has already is not sent again. Ends once the job has ended and everything is sent.",
        allow_abbrev=False,
    )
    add_job(parser, positional=True)
    parser.add_argument(
        "--to",
        action="append",
        choices=sorted(SINKS),
        default=[],
        help="where to; may be given more than once. Unless given: what [tracking] of the job's file says",
    )
    parser.add_argument("--project", metavar="NAME", help="at W&B and Trackio (default: counterpoint)")
    parser.add_argument(
        "--offline",
        action="store_true",
        help="W&B: write files below DIRECTORY/tracking/wandb, for `wandb sync`",
    )
    parser.add_argument("--name", help="the job's name there (default: that of its directory)")
    parser.add_argument("--follow", action="store_true", help="go on after the job has ended, until a signal")
    return parser
