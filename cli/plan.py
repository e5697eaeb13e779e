"""`counterpoint plan FILE --gpus 8xH100-80`: predicts the memory of a job or a fine-tuning by part, and what cannot fit."""

from __future__ import annotations

import argparse
import json
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
    held = ", ".join(f"{part} {gib(count)}" for part, count in plan.host.items())
    console.print(f"GiB in the host's memory for the trainer's first rank: {held}", soft_wrap=True)
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
    parser.add_argument("file", type=Path, metavar="FILE", help="the file of a job or a fine-tuning")
    parser.add_argument(
        "--gpus", required=True, metavar="NxNAME-GB", help="the GPUs of all machines, such as 8xH100-80 or 8xH200"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, in bytes")
    return parser
