"""`counterpoint run FILE`: a whole job. Checks everything that can be checked, resolves the model, claims the output directory,
starts the roles under `cluster`, shows their progress, and sums up."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from cli.command import Command, parse
from cli.display.console import lasting
from cli.display.progress import Progress, choose
from cli.make_model import resolve
from cluster.events import ENDED, Outcome, State, Worker
from cluster.job import Job, WorkerView
from cluster.notify import Heartbeat, notify, notify_ready
from cluster.process import last_lines
from inference.pool.sources import Sources
from job.check import check_imports, check_run, check_templates
from job.config import JobConfig
from job.configuration.layers import forget_environment
from job.directory import PROCESSES_FILE, orchestrator_of, run_ids_in, steps_of
from job.errors import UserError
from job.history import History
from job.metrics_lines import Line
from job.output import check_output, check_ports, claim, write_job
from job.run_state import how_a_guest_stands, how_it_ended, is_finished, verdict_on
from job.summary import SUMMARY_FILE, as_text, print_summary, summarise, summarise_runs
from job.workers import needs_servers, worker_of, workers_of
from transport.files.atomic import write_atomically

POLL_SECONDS = 0.5

PIPE_WIDTH = 130
"""Of tables where nothing has a width; 80 would break most of them."""


def main(arguments: list[str]) -> int:
    """The command."""
    command = parse("run", JobConfig, arguments, ["resume", "fresh"], check)
    if command is None:
        return 0
    config, fresh = command.config, "fresh" in command.switches
    forget_environment()
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    # Without markup: reasons and paths are others' words, and brackets in them would be taken for it.
    console = Console(file=lasting(sys.stdout), soft_wrap=True, width=width, markup=False)
    check_output(config, fresh)
    if needs_servers(config):
        check_ports(config.inference)
    elif all(map(is_finished, config.every_run)):
        _say_that_all_is_done(config, console)
        notify_ready()
        return 0
    console.print(f"model {config.model}", highlight=False)
    if not config.inference.replicas:
        servers = Sources(config.orchestrator.inference).describe()
        console.print(f"inference by servers that run already: {servers}", highlight=False)
    if len(config.runs) > config.trainer.max_runs:
        console.print(
            f"{len(config.runs)} runs for trainer.max_runs = {config.trainer.max_runs} places: the others wait their turn",
            highlight=False,
        )
    resolved = config.with_model(resolve(config.model))
    check_templates(resolved.every_run)
    given = command.file.read_bytes()
    with claim(config.output_dir, fresh) as moved:
        if moved:
            console.print(f"moved the previous job to {moved}", highlight=False)
        check_output(config, fresh)  # again, now that it is ours: finding the model may have taken minutes
        files = write_job(resolved, given)
        job = JobOnScreen(resolved, workers_of(resolved, files), console)
        outcome = job.run()
    if outcome.reason != "done" or job.left_to_do:
        console.print(f"\nIt goes on with: {how_to_go_on(arguments)}", highlight=False)
    return outcome.code


def how_to_go_on(arguments: Sequence[str]) -> str:
    """The command that resumes a job that was started with these arguments."""
    switches = ("--resume", "--fresh")
    words = [
        word
        for before, word in zip(["", *arguments], arguments, strict=False)
        if word.partition("=")[0] not in switches and not (before in switches and word in ("true", "false"))
    ]
    return f"counterpoint run {shlex.join(words)} --resume"


def check(command: Command[JobConfig]) -> None:
    """What can be found wrong by looking at the configuration alone. Raises `UserError`."""
    config = command.config
    if "fresh" in command.switches and config.resume:
        raise UserError("--resume and --fresh exclude each other")
    for run in config.every_run:
        try:
            check_run(run)
        except UserError as error:
            raise UserError(f"run {run.run_id!r}: {error}" if config.runs else str(error)) from None
    check_imports(config.every_run)


def _say_that_all_is_done(config: JobConfig, console: Console) -> None:
    for run in config.every_run:
        key = "its steps" if config.runs else "orchestrator.steps"
        console.print(
            f"run {run.run_id!r} in {config.output_dir} is done: {run.steps} of {run.steps} steps. "
            f"Raise {key} to go on, or start anew with --fresh",
            highlight=False,
        )


class JobOnScreen:
    """A job that runs, and what is shown and written of it."""

    def __init__(self, config: JobConfig, workers: list[Worker], console: Console) -> None:
        self._config = config
        self._workers = workers
        self._console = console
        self._began = time.time()
        self._histories = {
            run.run_id: History.of(config.output_dir, run.run_id, run.steps, since=self._began)
            for run in config.every_run
        }
        self._complaints: set[str] = set()
        """Runs and files that an error was already printed about."""
        self._recorded = b""
        """What was last written to `processes.json`."""
        self._heartbeat = Heartbeat()
        self._said: set[str] = set()
        """The notifications that were sent to systemd."""
        self._fresh_steps()  # a resumed job's past is no news
        self._job = Job(workers, self._on_change, self._guests, config.stay)
        self._progress: Progress

    def run(self) -> Outcome:
        """Runs the job to its end and sums up; how it ended."""
        self._progress = choose(self._console, self._histories)
        try:
            outcome = asyncio.run(self._supervise())
        finally:
            self._progress.close()
        self._fresh_steps()
        self._explain()
        self._sum_up(outcome)
        return outcome

    @property
    def left_to_do(self) -> bool:
        """Whether any of the job's runs lacks steps, as one that was stopped by itself does."""
        return any(self._histories[run.run_id].step < run.steps for run in self._config.every_run)

    async def _supervise(self) -> Outcome:
        running = asyncio.create_task(self._job.run())
        while not running.done():
            await asyncio.wait([running], timeout=POLL_SECONDS)
            if not running.done():
                self._job.look_for_guests()
                self._job.put_full_logs_aside()
            self._job.harmless(self._look, otherwise=None)
        if running.result().code == 0:
            self._tell("READY=1")  # systemd would take a job that ended at once for a failed start
        return running.result()

    def _tell_systemd(self) -> None:
        """Sends systemd (or another supervisor) the heartbeat, the readiness of trainer and servers, and the runs' steps."""
        self._heartbeat.beat()
        states = self._job.lifecycle.states
        if all(states[worker.name] is State.READY for worker in self._workers if not worker.task):
            self._tell("READY=1")
        if self._job.state is State.STOPPING:
            self._tell("STOPPING=1")
        steps = ", ".join(f"{history.run_id} step {history.so_far}" for history in self._histories.values())
        self._tell(f"STATUS={self._job.state}: {steps or 'no run'}")

    def _tell(self, words: str) -> None:
        if words not in self._said and notify(words):
            self._said = {*filter(lambda said: not said.startswith("STATUS="), self._said), words}

    def _look(self) -> None:
        self._tell_systemd()
        self._keep_record()
        self._progress.update(self._job.views(), self._fresh_steps())

    def _on_change(self, job: Job) -> None:
        self._keep_record()
        self._progress.update(job.views(), [])

    def _keep_record(self) -> None:
        """Keeps `processes.json` up to date for `counterpoint status`. A write that fails is tried again at the next call."""
        views = [asdict(view) for view in self._job.views()]
        record = json.dumps({"job": self._job.state, "workers": views}, indent=2).encode()
        if record != self._recorded and self._written(self._config.output_dir / PROCESSES_FILE, record):
            self._recorded = record

    def _written(self, path: Path, text: bytes) -> bool:
        """Writes a file that nothing depends on; returns whether that succeeded. The first failure for each file is printed."""
        try:
            write_atomically(path, text)
        except OSError as error:
            self._complain(path.name, f"{path.name} cannot be written: {error}")
            return False
        return True

    def _guests(self) -> Sequence[str]:
        """The runs whose orchestrator lives and is none of our workers: whoever started it, it needs trainer and servers."""
        states = self._job.lifecycle.states
        own = {run.run_id: states.get(worker_of(self._config, run), State.STOPPED) for run in self._config.every_run}
        directory = self._config.output_dir
        guests = [
            run_id
            for run_id in run_ids_in(directory)
            if own.get(run_id, State.STOPPED) in ENDED and self._lives(run_id)
        ]
        for run_id in guests:
            history = self._histories.setdefault(run_id, History.of(directory, run_id, since=self._began))
            if history.steps is None:  # it may have its lock and not yet have written its configuration
                history.steps = steps_of(directory, run_id)
        return guests

    def _lives(self, run_id: str) -> bool:
        """Whether the run has an orchestrator; not as far as we can know for one that we may not look at."""
        try:
            return orchestrator_of(self._config.output_dir, run_id) is not None
        except OSError as error:
            self._complain(run_id, f"run {run_id} cannot be read: {error}")
            return False

    def _fresh_steps(self) -> list[tuple[History, Line]]:
        fresh: list[tuple[History, Line]] = []
        for history in self._histories.values():
            fresh += [(history, line) for line in history.refresh()]
            if history.unreadable:
                self._complain(history.run_id, f"run {history.run_id} cannot be read: {history.unreadable}")
        return fresh

    def _complain(self, what: str, complaint: str) -> None:
        """Prints the first error about a run or a file. Such an error does not end the job."""
        if what not in self._complaints:
            self._complaints.add(what)
            self._console.print(complaint, highlight=False)

    def _explain(self) -> None:
        """Says why workers failed, by the end of their output."""
        judged = {worker_of(self._config, run) for run in self._config.runs if verdict_on(run.run_dir) is not None}
        for view in self._job.views():
            # The summary gives the reason for a verdict; workers killed on request need none.
            if view.state is not State.FAILED or view.name in judged or not view.last_death:
                continue
            log_file = next(worker.log_file for worker in self._workers if worker.name == view.name)
            quoted = "\n".join(f"  | {line}" for line in last_lines(log_file, start=view.log_from or 0))
            print(
                f"\ncounterpoint: {view.name} {view.last_death}. The end of {log_file}:\n{quoted}",
                file=lasting(sys.stderr),
            )

    def _sum_up(self, outcome: Outcome) -> None:
        directory, histories = self._config.output_dir, list(self._histories.values())
        elapsed = time.time() - self._began
        if len(histories) == 1:
            summary = summarise(histories[0], directory, elapsed, outcome.reason)
        else:
            summary = summarise_runs(histories, self._endings(), directory, elapsed, outcome.reason)
        paths = (
            {"summary": directory / SUMMARY_FILE} if self._written(directory / SUMMARY_FILE, as_text(summary)) else {}
        )
        if self._config.orchestrator.run_dir.exists() and not self._config.runs:
            paths["run"] = self._config.orchestrator.run_dir
        if any(history.shipped for history in histories):
            from cli.display.plot import plot

            try:
                paths["curves"] = plot(histories, directory / "curves.png", directory.name)
            except OSError as error:
                self._complain("curves.png", f"curves.png cannot be written: {error}")
        print_summary(summary, paths, self._console)

    def _endings(self) -> dict[str, str]:
        """How each run has ended, or stands."""
        views: dict[str, WorkerView] = {view.name: view for view in self._job.views()}
        directory = self._config.output_dir
        guests = {run_id: how_a_guest_stands(directory, history) for run_id, history in self._histories.items()}
        own = {
            run.run_id: how_it_ended(run, self._histories[run.run_id], views.get(worker_of(self._config, run)))
            for run in self._config.every_run
        }
        return guests | own
