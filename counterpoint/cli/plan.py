"""`counterpoint plan FILE --gpus 8xH100-80`: predicts the memory of a job or a fine-tuning by part, and its speed with `--speed`.

`counterpoint plan DIRECTORY` says what a job has measured: which side waits, and what is too old to be trained.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from counterpoint.cli.display.console import console_for
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.extras import require

if TYPE_CHECKING:
    from counterpoint.job.plan.plan import Plan
    from counterpoint.job.plan.planned import Planned

PIPE_WIDTH = 140

CANNOT_FIT = 2


def main(arguments: list[str]) -> int:
    """Runs the command; returns 2 if the job cannot fit. Raises `UserError` for a job or model that cannot be read."""
    given, flags = _parser().parse_known_args(arguments)
    if given.file.is_dir():
        if given.gpus is not None or given.speed is not None or given.price is not None or flags:
            raise UserError(
                f"{given.file} is a directory: what its job has measured is shown; leave all flags out but --json"
            )
        return _show_measured(given.file, given.json)
    if given.price is not None and given.speed is None:
        raise UserError(f"--price {given.price}: it is of the predicted hours; give --speed, too")
    if given.gpus is None:
        raise UserError("--gpus is missing: say which GPUs there are, such as --gpus 8xH100-80")
    if given.speed is not None:
        return _plan_speed(given, flags)
    from counterpoint.job.plan.devices import parse_gpus
    from counterpoint.job.resolve_model import resolve_model

    require("plan", "torch", "transformers")
    gpus = parse_gpus(given.gpus)
    model, planned = _read(given.file, flags)
    directory = resolve_model(model)
    from counterpoint.job.plan.plan import make_plan  # imports torch

    try:
        plan = make_plan(planned, directory, gpus)
    except ValueError as error:
        raise UserError(str(error)) from error
    if given.json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        _show(plan)
    return CANNOT_FIT if plan.problems else 0


def _read(file: Path, flags: list[str]) -> tuple[str, Planned]:
    """Returns the model of a job's file or of a fine-tuning's, and what is planned of it."""
    from counterpoint.job.config import JobConfig  # imports every role's configuration
    from counterpoint.job.configuration.load import load
    from counterpoint.job.file_kind import other_kind
    from counterpoint.job.plan.planned import planned_job, planned_sft
    from counterpoint.trainer.sft.config import SftConfig

    other = other_kind(file, JobConfig)
    if other is None:
        job = load(JobConfig, file, flags)
        return job.model, planned_job(job)
    kind, command = other
    if command != "sft":
        raise UserError(f"{file}: this is a {kind} file; only a job's or a fine-tuning's memory is planned")
    tuning = load(SftConfig, file, flags)
    return tuning.model, planned_sft(tuning)


def _plan_speed(given: argparse.Namespace, flags: list[str]) -> int:
    """Prints the predicted speed of a job. Raises `UserError`."""
    from counterpoint.cli.display.speed_tables import show_speed
    from counterpoint.job.config import JobConfig
    from counterpoint.job.configuration.load import load
    from counterpoint.job.plan.devices import parse_gpus
    from counterpoint.job.plan.measured import measured, rollouts_of
    from counterpoint.job.resolve_model import resolve_model

    require("plan", "torch", "transformers")
    if given.price is not None and not 0 <= given.price < math.inf:
        raise UserError(f"--price {given.price}: expected what a card costs an hour, such as 2.5")
    gpus, job = parse_gpus(given.gpus), load(JobConfig, given.file, flags)
    known = measured(Path(given.speed)) if Path(given.speed).is_dir() else rollouts_of(given.speed)
    directory = resolve_model(job.model)
    from counterpoint.job.plan.speed_plan import plan_speed  # imports torch

    try:
        plan = plan_speed(job, directory, gpus, known, given.price)
    except ValueError as error:
        raise UserError(f"{given.file}: {error}") from error
    if given.json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        show_speed(console_for(pipe_width=PIPE_WIDTH), plan)
    return 0


def _show_measured(directory: Path, as_json: bool) -> int:
    """Prints what a job has measured. Raises `UserError`."""
    from counterpoint.cli.display.speed_tables import show_measured
    from counterpoint.job.plan.measured import measured

    found = measured(directory)
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        show_measured(console_for(pipe_width=PIPE_WIDTH), found)
    return 0


def _show(plan: Plan) -> None:
    from counterpoint.job.plan.plan import gib

    console = console_for(pipe_width=PIPE_WIDTH)
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in plan.model.parameters.items())
    console.print(f"model: {plan.model.total:,} parameters ({kinds})", soft_wrap=True)
    table = Table(title=f"one {plan.gpus.name}, {gib(plan.gpus.memory)} GiB, of {plan.gpus.count}")
    for name in ("role", "part", "GiB"):
        table.add_column(name, justify="right" if name == "GiB" else "left")
    server = {} if plan.server is None else plan.server.parts
    for role, parts in (("trainer, a rank", plan.trainer), ("server, a GPU", server)):
        for part, count in parts.items():
            table.add_row(role, part, gib(count))
            role = ""
        if parts:
            table.add_row("", "together", gib(sum(parts.values())), end_section=True)
    console.print(table)
    largest = f"the largest that fits is {plan.largest_max_tokens}" if plan.largest_max_tokens else "none fits"
    console.print(f"trainer.max_tokens = {plan.max_tokens}; {largest}", soft_wrap=True)
    if plan.chosen is not None:
        console.print(
            f"trainer.activation_checkpointing is unset: {plan.chosen}",
            soft_wrap=True,
        )
    held = ", ".join(f"{part} {gib(count)}" for part, count in plan.host.items())
    console.print(f"GiB in the host's memory for the trainer's first rank: {held}", soft_wrap=True)
    kept = ", ".join(f"{part} {gib(count)}" for part, count in plan.disk.items())
    console.print(f"GiB on the disk, for resumes, branches and checks: {kept}", soft_wrap=True)
    if plan.server is not None:
        console.print(
            f"KV cache: {plan.server.token:,} bytes a token and GPU; {plan.sequences} sequences of max_model_len at once",
            soft_wrap=True,
        )
    for problem in plan.problems:
        console.print(f"does not fit: {problem.message}; change {problem.key}", soft_wrap=True)
    for words in plan.advice:
        console.print(f"would fit: {words}", soft_wrap=True, markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint plan",
        description="Predicts the memory of the trainer and the servers of a job, or of a fine-tuning, by part, before anything "
        "is started, and the largest max_tokens. Ends with 2 if it cannot fit, and says what would. Takes --section.key VALUE as "
        "`run` does.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the file of a job or a fine-tuning, or the directory of a job that has run",
    )
    parser.add_argument(
        "--gpus",
        metavar="NxNAME-GB",
        help="the GPUs of all machines, such as 8xH100-80 or 8xH200; with --speed also cpu, this machine's processor",
    )
    parser.add_argument(
        "--speed",
        metavar="DIRECTORY|PROMPT+COMPLETION",
        help="predict the seconds of a step instead of the memory: from a job on such cards that has run, or, as the least that "
        "they can be, from the mean tokens of a rollout, such as 200+800",
    )
    parser.add_argument("--price", type=float, metavar="PRICE", help="of a card and hour, for the price of all steps")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, in bytes")
    return parser
