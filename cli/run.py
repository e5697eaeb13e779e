"""`counterpoint run FILE`: a whole job. Checks everything that can be checked, resolves the model, claims the output directory,
starts the roles under `cluster`, shows their progress, and sums up."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from cli.check import SAFE_PATH, check_imports, check_run
from cli.command import parse
from cli.console import lasting
from cli.errors import UserError
from cli.history import History
from cli.job import JobConfig
from cli.load import forget_environment
from cli.make_model import resolve
from cli.output import check_output, check_port, claim, write_job
from cli.progress import Progress, choose
from cli.standing import all_committed, is_finished
from cli.summary import print_summary, summarise, write_summary
from cluster.job import Job
from cluster.lifecycle import Outcome, Worker
from cluster.process import last_lines
from transport.atomic import write_atomically

PROCESSES_FILE = "processes.json"
POLL_SECONDS = 0.5

COMPUTE_NICE = 10
"""vLLM and the trainer yield the CPU to the orchestrator, whose loop must answer at once and needs little; between the two of
them nothing changes."""


def main(arguments: list[str]) -> int:
    """The command."""
    command = parse("run", JobConfig, arguments, ["resume", "fresh"], check)
    if command is None:
        return 0
    config, fresh = command.config, "fresh" in command.switches
    forget_environment()
    console = Console(file=lasting(sys.stdout), soft_wrap=True)
    check_output(config, fresh)
    if config.resume and is_finished(config):
        run = config.orchestrator
        console.print(
            f"run {run.run_id!r} in {config.output_dir} is done: {run.steps} of {run.steps} steps. "
            "Raise orchestrator.steps to go on, or start anew with --fresh",
            highlight=False,
        )
        return 0
    if not (config.resume and all_committed(config)):
        check_port(config.inference)
    console.print(f"model {config.model}", highlight=False)
    resolved = config.with_model(resolve(config.model))
    given = command.file.read_bytes()
    with claim(config.output_dir, fresh) as moved:
        if moved:
            console.print(f"moved the previous job to {moved}", highlight=False)
        check_output(config, fresh)  # again, now that it is ours: finding the model may have taken minutes
        files = write_job(resolved, given)
        outcome = _run(resolved, files, console)
    if outcome.reason != "done":
        words = [word for word in arguments if word not in ("--resume", "--fresh")]
        console.print(f"\nIt goes on with: counterpoint run {shlex.join(words)} --resume", highlight=False)
    return outcome.code


def check(config: JobConfig, switches: frozenset[str]) -> None:
    """What can be found wrong by looking at the configuration alone. Raises `UserError`."""
    if "fresh" in switches and config.resume:
        raise UserError("--resume and --fresh exclude each other")
    check_run(config.orchestrator)
    check_imports(config.orchestrator)


def workers_of(config: JobConfig, files: dict[str, Path]) -> list[Worker]:
    """The roles, in the order in which they start; they stop in its reverse, so that the orchestrator can still drain. Inference
    only where there is something left to generate."""
    command = [sys.executable, "-m", "cli.main"]
    output_dir, orchestrator = config.output_dir, config.orchestrator
    inference = Worker(
        "inference_0",
        [*command, "inference", str(files["inference"])],
        output_dir / "inference_0.log",
        ready_timeout_seconds=config.inference.startup_timeout_seconds + 60,
        nice=COMPUTE_NICE,
        environment=_environment(config.gpus.inference),
    )
    return ([] if all_committed(config) else [inference]) + [
        Worker(
            "trainer",
            [*command, "trainer", str(files["trainer"])],
            output_dir / "trainer" / "trainer.log",
            may_end=True,
            ready_timeout_seconds=600,
            stop_timeout_seconds=120,
            nice=COMPUTE_NICE,
            environment=_environment(config.gpus.trainer),
        ),
        Worker(
            "orchestrator",
            [*command, "orchestrator", str(files["orchestrator"])],
            output_dir / "orchestrator.log",
            task=True,
            after=("trainer",),
            ready_timeout_seconds=orchestrator.inference.startup_timeout_seconds + 60,
            stop_timeout_seconds=orchestrator.shutdown_timeout_seconds + 15,
            environment=_environment(None),
        ),
    ]


def _environment(gpus: list[int] | None) -> dict[str, str]:
    """What a role's environment has besides ours, and what it starts inherits."""
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    return SAFE_PATH | visible


def _run(config: JobConfig, files: dict[str, Path], console: Console) -> Outcome:
    began = time.monotonic()
    run_id = config.orchestrator.run_id
    history = History.of(config.output_dir, run_id, since=time.time())
    history.refresh()  # a resumed job's past is no news
    progress = choose(console, history, config.orchestrator.steps)
    workers = workers_of(config, files)
    try:
        outcome = asyncio.run(_supervise(workers, config.output_dir, history, progress))
    finally:
        progress.close()
    history.refresh()
    _explain(outcome, workers)
    summary = summarise(history, config.output_dir, time.monotonic() - began, outcome.reason)
    paths = {"summary": write_summary(summary, config.output_dir)}
    if config.orchestrator.run_dir.exists():
        paths["run"] = config.orchestrator.run_dir
    if history.shipped:
        from cli.plot import plot

        paths["curves"] = plot(history, config.output_dir / "curves.png", config.output_dir.name)
    print_summary(summary, paths, console)
    return outcome


async def _supervise(workers: list[Worker], output_dir: Path, history: History, progress: Progress) -> Outcome:
    """Runs the job, and beside it the display."""

    def on_change(job: Job) -> None:
        _record_processes(job, output_dir)
        progress.update(job.views(), [])

    job = Job(workers, on_change)
    running = asyncio.create_task(job.run())
    while not running.done():
        await asyncio.wait([running], timeout=POLL_SECONDS)
        progress.update(job.views(), history.refresh())
    return running.result()


def _record_processes(job: Job, output_dir: Path) -> None:
    """Keeps `processes.json` true, for `counterpoint status` and for people with a debugger."""
    views = [asdict(view) for view in job.views()]
    text = json.dumps({"job": job.state, "workers": views}, indent=2).encode()
    path = output_dir / PROCESSES_FILE
    if not path.exists() or path.read_bytes() != text:
        write_atomically(path, text)


def _explain(outcome: Outcome, workers: list[Worker]) -> None:
    """Says why a job failed, in the failing worker's own last words."""
    if outcome.failed_worker is None:
        return
    log_file = next(worker.log_file for worker in workers if worker.name == outcome.failed_worker)
    lines = last_lines(log_file)
    quoted = "\n".join(f"  | {line}" for line in lines)
    print(f"\ncounterpoint: {outcome.reason}. The end of {log_file}:\n{quoted}", file=lasting(sys.stderr))
