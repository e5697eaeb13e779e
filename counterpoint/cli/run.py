"""`counterpoint run FILE`: runs a whole job, shows its progress, and prints its summary."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from counterpoint.cli.arguments.command import ParsedCommand, parse
from counterpoint.cli.display.console import console_for, lasting, printed_beside
from counterpoint.cli.display.progress import choose
from counterpoint.cli.display.summary_tables import print_summary
from counterpoint.cluster.attended.left_running import has_workers
from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.manager.events import Outcome
from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.inference.pool.sources import Sources
from counterpoint.job.admin.reload import Reload, flat
from counterpoint.job.check import check_backend, check_fit, check_job, check_memory, check_port_of_service
from counterpoint.job.claim_directory import check_directory, claim_directory
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.layers import forget_environment
from counterpoint.job.configuration.load import to_toml
from counterpoint.job.directory import JOB_FILE, control_directory, read_json
from counterpoint.job.environments.before_start import rehearse_runs
from counterpoint.job.fine_tuning import as_begun, fine_tune
from counterpoint.job.plan.at_start import with_choice
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.metrics_lines import Line
from counterpoint.job.reading.redaction import redact
from counterpoint.job.reading.run_state import committed_steps, eviction_of, evictions_of_all_left
from counterpoint.job.resolve_model import resolve_model
from counterpoint.job.server_ports import as_started, held_ports
from counterpoint.job.serving.config import STATE, links_of, token_files
from counterpoint.job.supervision import SupervisedJob
from counterpoint.job.workers import is_done, needs_servers, specification
from counterpoint.job.write_job import write_job
from counterpoint.models.build import model_at_hand
from counterpoint.run.changes import kept
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable, shortened
from counterpoint.transport.process.extras import SERVING, TRAINING, lacking, require
from counterpoint.transport.process.journal import prioritized
from counterpoint.transport.process.notify import notify_ready
from counterpoint.transport.process.permanent_errors import NOTHING_LEARNED
from counterpoint.transport.telemetry.start_phases import OVER, START_FILE, Note, append

PIPE_WIDTH = 130

_SPELLINGS = ("--keep-going", "--keep-going=true", "--keep_going", "--keep_going=true")
KEEP_GOING = dict.fromkeys(_SPELLINGS, "--orchestrator.schedule.give_up_after=0")
"""The flag that stands for a key, for those whose first groups are meant to show no difference; as any switch may be written."""

STOPPED_BY_A_SIGNAL = frozenset({128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM})
"""Exit codes of a job that was stopped on request."""

MOST_CHANGED = 20
"""Keys that a resume names as changed."""

SUPERVISOR = "supervisor"
"""What this process is called among those of a job's start."""

LONGEST_VALUE = 200
"""Characters of a changed value."""


def main(arguments: list[str], name: str = "run", model: type[JobConfig] = JobConfig) -> int:
    """Runs the command of that name, whose file is a `model`. Returns the job's exit code."""
    began = [Note.now("checks")]
    words = [KEEP_GOING.get(word, word) for word in arguments]
    switches = ["resume", "fresh", *(["keep-going"] if name == "run" else [])]
    command = parse(name, model, words, switches, check, show=_rehearsed)
    if command is None:
        return 0
    variables = forget_environment()
    console = console_for(lasting(sys.stdout), pipe_width=PIPE_WIDTH, markup=False, soft_wrap=True)
    config = command.config
    check_directory(config, "fresh" in command.switches)
    if is_done(config):
        _print_done(config, console)
        notify_ready()
        return 0
    if config.backend == "local":
        servers = SERVING if needs_servers(config) and config.inference.replicas else ()
        require("a job's trainer and its servers" if servers else "a job's trainer", *TRAINING, *servers)
    left_running = has_workers(control_directory(config.output_dir))  # by a killed command
    with held_ports(config, left_running=left_running) as config:
        say = partial(console.print, highlight=False)
        reload = Reload(config.output_dir, name, arguments, config, say, variables)
        resuming = resuming_command(arguments, name)
        return _play(replace(command, config=config), left_running, reload, console, resuming, began)


def _play(
    command: ParsedCommand[JobConfig],
    left_running: bool,
    reload: Reload,
    console: Console,
    resuming: str,
    phases: list[Note],
) -> int:
    """Starts a job whose ports are held, and plays it to its end. Returns its exit code. Its start had those `phases` so far."""
    config, fresh = command.config, "fresh" in command.switches
    options = check_backend(config)
    if not left_running:
        if config.backend == "local" and needs_servers(config):
            check_memory(config.inference)
        if config.tinker is not None:
            check_port_of_service(config.tinker)
    _print_beginning(config, console)
    resolved = config.with_model(resolve_model(config.model))
    check_fit(resolved)
    if config.backend == "local" and not config.resume:
        phases.append(Note.now("rehearses environments"))
        rehearse_runs(resolved, Path(resolved.trainer.model))
    phases.append(Note.now("writes files, starts workers"))
    say = partial(console.print, highlight=False)
    resolved = with_choice(resolved, say, left_running=left_running and config.resume)
    given = command.file.read_bytes()
    with claim_directory(config.output_dir, fresh) as moved:
        if moved:
            console.print(f"moved the previous job to {moved}", highlight=False)
        check_directory(config, fresh)  # again, since resolving the model may have taken minutes
        if config.resume:
            _print_changed_keys(as_begun(resolved), console)
            _print_kept_changes(resolved, console)
        files = write_job(as_begun(resolved), given)
        if resolved.sft is not None:
            if code := fine_tune(resolved, say):
                console.print(f"\nIt goes on with: {resuming}", highlight=False)
                return code
            resolved = as_begun(resolved)
            files = write_job(resolved, given)
        append(resolved.output_dir / START_FILE, SUPERVISOR, phases, anew=True)
        job = SupervisedJob(resolved, specification(resolved, files), say, options, reload)
        outcome = _run(job, resolved, console)
        _print_end(job, resolved, outcome, console)
        if outcome.reason == "done":
            for number, line in enumerate(_next_commands(job, resolved, command.file)):
                console.print(f"  {'' if number else 'next':<8} {line}", highlight=False)
    if outcome.reason != "done" or not job.is_complete:
        _print_evictions(resolved, console)
        console.print(f"\n{_how_to_go_on(resolved, outcome, resuming)}", highlight=False)
    return outcome.code


def check(command: ParsedCommand[JobConfig]) -> None:
    """Raises `UserError` for what is wrong with the configuration alone."""
    if "fresh" in command.switches and command.config.resume:
        raise UserError("--resume and --fresh exclude each other")
    check_job(command.config)


def _rehearsed(command: ParsedCommand[JobConfig]) -> str:
    """Returns what a dry run prints, after a rehearsal of the environments, as before a start."""
    config = command.config
    if config.backend == "local" and not config.resume:
        if (model := model_at_hand(config.model)) is not None:
            rehearse_runs(config, model)
        else:
            print(f"environments are not rehearsed: the model {config.model} is not here yet", file=sys.stderr)
    return to_toml(as_started(config))


def _how_to_go_on(job: JobConfig, outcome: Outcome, command: str) -> str:
    """Returns how a job goes on that has ended before it was done; `command` resumes it."""
    if not job.stay and evictions_of_all_left(job.every_run):
        return f"Once that is removed, it goes on with: {command}"
    if outcome.code == NOTHING_LEARNED:
        way_on = f"Once the rewards of a group can differ, it goes on with: {command}"
        return f"{way_on}\nHowever long it takes: {command} --keep-going"
    if outcome.code != UserError.code:
        failed = outcome.code not in (0, *STOPPED_BY_A_SIGNAL)
        return f"{'Once the cause above is removed, it' if failed else 'It'} goes on with: {command}"
    advice = f"Once the configuration is right, it goes on with: {command}"
    if any(map(committed_steps, job.every_run)):
        return advice
    return f"{advice}\nNo step was done yet: --fresh instead of --resume loses nothing, and another model needs it"


def _next_commands(job: SupervisedJob, config: JobConfig, file: Path) -> list[str]:
    """Returns what to look at a result with: its page, its rollouts, its evaluations on the best or newest weights."""
    looking = [
        job.histories[run.run_id].looking_commands(file, bool(config.runs), bool(run.evaluations))
        for run in config.every_run
    ]
    return [f"counterpoint serve {shlex.quote(str(config.output_dir))}", *max(looking, key=len, default=[])]


def resuming_command(arguments: Sequence[str], name: str = "run") -> str:
    """Returns the command that resumes a job that was started with these arguments."""
    switches = ("--resume", "--fresh")
    words = [
        word
        for before, word in zip(["", *arguments], arguments, strict=False)
        if word.partition("=")[0] not in switches and not (before in switches and word in ("true", "false"))
    ]
    return f"counterpoint {name} {shlex.join(words)} --resume"


def _run(job: SupervisedJob, config: JobConfig, console: Console) -> Outcome:
    with printed_beside(console):
        progress = choose(console, job.histories, config.output_dir if config.tinker is not None else None)
        links = LinksOfThePage(config, console)
        starting = True
        preparing = threading.Thread(target=_prepare_curves, name="preparing the curves", daemon=True)

        def show(workers: list[WorkerView], fresh: list[tuple[History, Line]]) -> None:
            nonlocal starting
            if starting and any(worker.pid is not None for worker in workers):
                starting = False
                append(config.output_dir / START_FILE, SUPERVISOR, [Note.now(OVER)])
            links.print_once(workers)
            progress.update(workers, fresh)
            if job.is_complete and preparing.ident is None:  # while the workers end, instead of after them
                preparing.start()

        try:
            return job.run(show)
        except ClusterError as error:
            raise UserError(str(error)) from error
        finally:
            progress.close()
            if preparing.ident is not None:
                preparing.join()


class LinksOfThePage:
    """Prints once, on a terminal alone, what to open in a browser, with the tokens: other output may become a log."""

    def __init__(self, config: JobConfig, console: Console) -> None:
        self._section = config.serve if sys.stdout.isatty() else None
        self._state = config.output_dir / STATE
        self._console = console

    def print_once(self, workers: Sequence[WorkerView]) -> None:
        """Prints the links once the page's server is ready, whose status begins with its address."""
        server = next((each for each in workers if each.name == "serve" and each.state is State.READY), None)
        if self._section is None or server is None or not server.status:
            return
        files = token_files(self._section, self._section.state_directory or self._state)
        with suppress(OSError):  # its own log says what is wrong with them
            links = links_of(server.status.partition(";")[0], files)
            self._console.print(links, highlight=False, markup=False, soft_wrap=True)  # a broken link opens nothing
        self._section = None


def _print_done(config: JobConfig, console: Console) -> None:
    for run in config.every_run:
        key, committed = "its steps" if config.runs else "orchestrator.steps", committed_steps(run)
        done = (
            f"{committed} of {run.steps} steps"
            if committed == run.steps
            else f"{committed} steps, {run.steps} asked for"
        )
        raised = key if committed == run.steps else f"{key} above {committed}"
        console.print(
            f"run {run.run_id!r} in {config.output_dir} is done: {done}. Raise {raised} to go on, or start anew with --fresh",
            highlight=False,
        )


def _print_beginning(config: JobConfig, console: Console) -> None:
    console.print(f"model {config.model}", highlight=False)
    if config.backend == "local" and config.inference.replicas and needs_servers(config):
        console.print(f"servers at {', '.join(config.orchestrator.inference.urls)}", highlight=False)
    if config.resume:
        if not (config.output_dir / JOB_FILE).exists():
            console.print(f"--resume: no job in {config.output_dir} yet; it begins at step 0", highlight=False)
        _print_evictions(config, console)
    if not config.inference.replicas:
        servers = Sources(config.orchestrator.inference).describe()
        console.print(f"inference by servers that run already: {servers}", highlight=False)
    if len(config.runs) > config.trainer.max_runs:
        console.print(
            f"{len(config.runs)} runs for trainer.max_runs = {config.trainer.max_runs} slots: the others wait for a slot",
            highlight=False,
        )


def _print_changed_keys(config: JobConfig, console: Console) -> None:
    """Prints which keys have other values than at the last start. The file of that start may be of another version."""
    if not (file := config.output_dir / JOB_FILE).exists():
        return
    before = flat(redact(read_json(file)))
    now = flat(redact(config.model_dump(mode="json")))
    # A key without a value is None in one file and missing in another, of another version or with a table in its place.
    keys = [key for key in sorted({*before, *now}) if key.rpartition(".")[2] != "resume"]
    changed = [key for key in keys if before.get(key) != now.get(key)]
    for key in changed[:MOST_CHANGED]:
        given = (table.get(key) for table in (before, now))
        values = ("unset" if value is None else shortened(repr(value), LONGEST_VALUE) for value in given)
        console.print(f"changed since the last start: {key}: {' → '.join(values)}", highlight=False)
    if len(changed) > MOST_CHANGED:
        console.print(f"and {len(changed) - MOST_CHANGED} more keys", highlight=False)


def _print_kept_changes(config: JobConfig, console: Console) -> None:
    """Prints which values hold that were changed while runs were trained, in place of those of their files."""
    for run in config.every_run:
        with suppress(ValueError):  # the run's own process says what is wrong with its journal
            for key, values in kept(run).items():
                value, given = (shortened(repr(each), LONGEST_VALUE) for each in values)
                console.print(
                    f"run {run.run_id}: {key} = {value}, as changed while it ran; the file has {given}", highlight=False
                )


def _print_evictions(config: JobConfig, console: Console) -> None:
    for run in config.every_run:
        if (eviction := eviction_of(run)) is not None:
            console.print(f"\n{eviction}", highlight=False)


def _print_end(job: SupervisedJob, config: JobConfig, outcome: Outcome, console: Console) -> None:
    """Prints why workers failed, and the summary with the paths of its files."""
    for failed in job.failed_workers(outcome):
        quoted = "".join(f"\n  | {line}" for line in failed.last_lines)
        log = f"The end of {failed.log_file}:{quoted}" if quoted else f"Its log: {failed.log_file}"
        message = f"\ncounterpoint: {failed.name} {failed.death.removesuffix('.')}. {log}"
        print(prioritized(printable(message), logging.ERROR, sys.stderr), file=lasting(sys.stderr))
    summary, run_dir = job.summary(outcome), config.orchestrator.run_dir
    files = {
        "summary": job.write_summary(summary),
        "run": run_dir if run_dir.exists() and not config.runs else None,
        "curves": _draw_curves(job, config, console),
    }
    print_summary(summary, {name: path for name, path in files.items() if path is not None}, console)


def _prepare_curves() -> None:
    from counterpoint.cli.display.plot import prepare

    with suppress(OSError, ModuleNotFoundError):  # such as for a cache of fonts; whoever draws says so
        prepare()


def _draw_curves(job: SupervisedJob, config: JobConfig, console: Console) -> Path | None:
    """Draws the runs' curves; returns the picture's path, or None if there are no steps, or if it cannot be drawn."""
    histories = list(job.histories.values())
    if not any(history.shipped for history in histories):
        return None
    from counterpoint.cli.display.plot import plot

    if reason := lacking("matplotlib"):
        console.print(f"curves.png {reason}", markup=False, highlight=False)
        return None
    try:
        return plot(histories, config.output_dir / "curves.png", config.output_dir.name)
    except OSError as error:
        console.print(f"curves.png cannot be written: {error}", highlight=False)
        return None
