"""`counterpoint eval FILE`: plays the evaluations of a job's or an orchestrator's file, on a checkpoint or on running servers."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from counterpoint.cli.arguments.command import log_to_stderr, parse
from counterpoint.cli.display.console import console_for
from counterpoint.job.config import JobConfig
from counterpoint.job.file_kind import other_kind
from counterpoint.job.resolve_model import resolve_model
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable
from counterpoint.transport.process.extras import SERVING, require

if TYPE_CHECKING:
    from counterpoint.inference.config import InferenceConfig
    from counterpoint.orchestrator.evaluation.alone import Subject
    from counterpoint.orchestrator.evaluation.loading import LoadedEvaluation
    from counterpoint.orchestrator.evaluation.result import EvaluationResult

PIPE_WIDTH = 160
COLUMNS = ("evaluation", "metric", "value", "95 % interval", "examples", "completed", "failed")


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 0 if every evaluation has a result, 1 if no rollout of one completed or inference failed."""
    given, others = _parser().parse_known_args(arguments)
    if given.help and given.file is None:
        _parser().print_help()
        return 0
    if given.file is None:
        raise UserError(f"eval: which file?\n{_parser().format_usage()}`counterpoint eval --help` says more")
    if given.help:
        others.append("--help")
    kind = other_kind(given.file, JobConfig)
    model: Any = RunConfig if kind is not None and kind[1] == "orchestrator" else JobConfig

    def check(_command: object) -> None:
        if given.checkpoint is not None:
            from counterpoint.job.evaluation.subject import find_checkpoint

            find_checkpoint(given.checkpoint)

    command = parse("eval", model, [str(given.file), *others], check=check)
    if command is None:
        return 0
    log_to_stderr()
    run, server, variables = sections(command.config, given, "eval")
    return _evaluate(run, server, variables, given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint eval",
        description="Plays the evaluations of a file on a checkpoint, on running servers, or on the base model, and prints their "
        "results. A server is started unless --server names one.",
        epilog="--section.key VALUE sets keys of the file, and --dry-run prints the resolved configuration.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a job's or an orchestrator's file")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="weights: broadcast/step_N, best/, or any model or adapter"
    )
    parser.add_argument("--server", action="append", default=[], metavar="URL", help="a running server (repeatable)")
    parser.add_argument(
        "--model", metavar="NAME", help="with --server: the model's name there (default: the base model)"
    )
    parser.add_argument("--evaluation", action="append", default=[], metavar="NAME", help="only this one (repeatable)")
    parser.add_argument("--run", metavar="ID", help="the run whose evaluations are meant, if the file has several")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a new directory (default: eval-DATE-TIME)")
    parser.add_argument("-h", "--help", action="store_true", help="print this help")
    return parser


def run_of(config: JobConfig, run_id: str | None, file: Path) -> RunConfig:
    """Returns the run that is meant: the one called `run_id`, or the only one. Raises `UserError`."""
    runs = {run.run_id: run for run in config.every_run}
    if run_id is not None and run_id not in runs:
        raise UserError(f"--run {run_id}: {file} has the runs {', '.join(runs)}")
    if run_id is None and len(runs) != 1:
        raise UserError(f"{file} has {len(runs)} runs; name one with --run: {', '.join(runs)}")
    return next(run for run in runs.values() if run_id in (None, run.run_id))


def sections(
    config: JobConfig | RunConfig, given: argparse.Namespace, command: str
) -> tuple[RunConfig, InferenceConfig | None, dict[str, str]]:
    """Returns the run, its server's configuration if one may be started, and this one's variables, with models resolved."""
    if isinstance(config, RunConfig):
        if not given.server:
            raise UserError(
                f"{given.file}: an orchestrator's file describes no server to start: name one with --server URL"
            )
        return config.model_copy(update={"model": str(resolve_model(config.model))}), None, {}
    chosen = run_of(config, given.run, given.file).run_id
    if not given.server:
        require(f"{command} without --server", *SERVING)
    resolved = config.with_model(resolve_model(config.model))
    run = next(each for each in resolved.every_run if each.run_id == chosen)
    if given.server:
        return run, None, {}
    from counterpoint.job.placement import devices

    if not config.inference.replicas:
        raise UserError(f"{given.file}: inference.replicas = 0 starts no server: name running ones with --server URL")
    visible = devices(resolved)["inference_0"] if config.gpus.inference is not None else []
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))} if visible else {}
    return run, resolved.server(0), variables


def _evaluate(
    run: RunConfig, server: InferenceConfig | None, variables: dict[str, str], given: argparse.Namespace
) -> int:
    from counterpoint.inference.base import InferenceError, ModelNotServed
    from counterpoint.job.claim_directory import check_writable
    from counterpoint.job.evaluation.server import at_servers, server_of
    from counterpoint.job.evaluation.subject import find_checkpoint, subject_of
    from counterpoint.orchestrator.evaluation.alone import load_evaluations

    if given.model is not None and not given.server:
        raise UserError("--model names a model of running servers: give --server, or --checkpoint for weights on disk")
    try:
        evaluations = load_evaluations(run, given.evaluation)
    except ValueError as error:
        raise UserError(f"{given.file}: {error}") from None
    run = at_servers(run, given.server) if given.server else run
    checkpoint = None if given.checkpoint is None else find_checkpoint(given.checkpoint)
    subject = subject_of(run, checkpoint, given.model, given.server)
    directory = given.output or Path(f"eval-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if directory.exists():
        raise UserError(f"--output {directory} exists; results are written to a new directory")
    check_writable(f"--output {directory}", directory)
    own = server_of(server, checkpoint, subject, directory) if server is not None else None
    if own is not None:
        directory.mkdir(parents=True, exist_ok=True)  # for its log; else for the first result
    try:
        results = asyncio.run(_play(run, evaluations, subject, directory, own, variables))
    except ModelNotServed as error:
        raise UserError(f"{error}. Name one of them with --model") from None
    except InferenceError as error:
        print(f"counterpoint: error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # an environment that does not start
        raise UserError(str(error)) from None
    console = console_for(pipe_width=PIPE_WIDTH, markup=False)
    console.print(evaluation_table(results))
    console.print(f"results: {directory / 'evaluations.jsonl'}", highlight=False, soft_wrap=True)
    for result in results:
        if not result.line["rollouts/completed"]:
            most = next(iter(result.line["failures"]), "")
            print(
                f"counterpoint: error: evaluation {result.config.name}: no rollout completed: {most}", file=sys.stderr
            )
    return 0 if all(result.line["rollouts/completed"] for result in results) else 1


async def _play(
    run: RunConfig,
    evaluations: list[LoadedEvaluation],
    subject: Subject,
    directory: Path,
    server: InferenceConfig | None,
    variables: dict[str, str],
) -> list[EvaluationResult]:
    from counterpoint.job.evaluation.server import LOG, at_servers, cause_in, server_running, unless_ended, url_of
    from counterpoint.orchestrator.evaluation.alone import play_evaluations

    def announce(result: EvaluationResult) -> None:
        print(result.in_words(), file=sys.stderr)

    def say(words: str) -> None:
        print(words, file=sys.stderr)

    if server is None:
        return await play_evaluations(run, evaluations, subject, directory, announce, say)
    print(
        f"starting a server of {', '.join(map(str, subject.described.values()))}; its log is {server.log_file}",
        file=sys.stderr,
    )
    async with server_running(server, directory, variables) as ended:
        work = play_evaluations(
            at_servers(run, [url_of(server)], server), evaluations, subject, directory, announce, say
        )
        return await unless_ended(work, ended, lambda: cause_in(directory / LOG))


def evaluation_table(results: Sequence[EvaluationResult]) -> Table:
    """Returns a row for each metric, with those of single environments if an evaluation has several, and those of turns."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("evaluation", "metric") else "right", no_wrap=True)
    for result in results:
        several = len(result.config.environments) > 1
        shown = {
            name: each
            for name, each in result.estimates.items()
            if several or name in result.config.own_metrics or "/reward/turn/" in name
        }
        counts = [str(result.line[key]) for key in ("examples", "rollouts/completed", "rollouts/failed")]
        if not shown:
            table.add_row(printable(result.config.name), "failed", "", "", *counts)
        for position, (name, each) in enumerate(shown.items()):
            interval = "" if each.low is None or each.high is None else f"{each.low:.4g} to {each.high:.4g}"
            first = position == 0
            title = printable(result.config.name) if first else ""
            table.add_row(title, printable(name), f"{each.value:.4g}", interval, *(counts if first else ("", "", "")))
    return table
