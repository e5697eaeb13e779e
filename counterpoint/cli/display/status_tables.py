"""The status of a job as tables and remarks.

Reasons, logs and statuses may come from a guest. So control characters are escaped and markup is not interpreted.
"""

from __future__ import annotations

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from counterpoint.cli.display.blame_table import blame_table
from counterpoint.cluster.worker_view import State
from counterpoint.job.number_format import milliseconds, number, scientific
from counterpoint.job.reading.metrics import evaluations
from counterpoint.job.reading.metrics.history import RATE_STEPS, History
from counterpoint.job.reading.rollouts.failure_example import FailureExamples
from counterpoint.job.reading.status import JobSnapshot
from counterpoint.orchestrator.rollouts.failures import failures_in_words, sum_failures
from counterpoint.orchestrator.step.discarded import in_words
from counterpoint.orchestrator.step.phases import phases_in_words, sum_phases
from counterpoint.run.loop_health.slow_spots import slow_spots_of
from counterpoint.trainer.telemetry import mismatch
from counterpoint.transport.outages import OutageKind
from counterpoint.transport.printable import printable
from counterpoint.transport.process.exit_codes import is_explained
from counterpoint.transport.telemetry.agent_time import agent_times, agents_in_words

TEXT_COLUMNS = ("run", "state")
LEGEND = (
    "staleness: updates between the generation of a token and its training; lag: of the event loop in the newest step; KL: "
    f"inference against trainer; tokens/s: over the newest {RATE_STEPS} steps"
)
"""Explains the columns of runs."""

NUMBER_COLUMNS = ("step", "trained", "reward", "evaluated", "staleness", "lag p99", "lag max", "KL", "tokens/s")
DIED = frozenset({State.RESTARTING, State.EXITED, State.FAILED})
"""States of a worker whose last death is of interest."""

PROCESS_COLUMNS = ("process", "state", "pid", "alive", "restarts", "status")


def status_parts(status: JobSnapshot) -> list[RenderableType]:
    """Returns the parts to print, from top to bottom."""
    parts: list[RenderableType] = [_runs(status)]
    if any(history.step for history in status.histories.values()):
        parts.append(Text(LEGEND, "dim"))
    if status.fine_tuning is not None:
        parts.append(_text(str(status.fine_tuning), "dim"))
    examples = FailureExamples(status.directory)
    for run_id in status.histories:
        parts += _remarks(status, run_id, examples)
    lines = (line for history in status.histories.values() for line in history.shipped.values())
    if slow_spots := slow_spots_of(lines).worst():
        parts.append(blame_table(slow_spots))
    if not status.workers and status.fine_tuning is not None:
        return parts
    if not status.workers:
        return [*parts, Text("No processes are known: the roles were not started by `counterpoint run`.", "dim")]
    dead = [worker for worker in status.workers if worker["last_death"] and worker["state"] in DIED]
    errors = [_text(f"{worker['name']} {worker['state']}: it {worker['last_death']}", "red") for worker in dead]
    explained = {worker["name"] for worker in dead if is_explained(worker["last_death"])}
    last = status.last_errors()
    errors += [_text(f"last error of {name}: {line}", "red") for name, line in last.items() if name not in explained]
    if status.supervisor_gone:
        errors.append(_text(status.supervisor_gone, "red"))
    return [*parts, _processes(status), *errors]


def _remarks(status: JobSnapshot, run_id: str, examples: FailureExamples) -> list[Text]:
    """What has no column in the table of runs."""
    history = status.histories[run_id]
    remarks = []
    if (exclusion := status.exclusion_of(run_id)) is not None:
        remarks.append(_text(f"run {run_id} {exclusion}", "red"))
    for outage in status.outages_of(run_id):
        starts = status.first_starts("trainer" if outage.kind is OutageKind.TRAINER else "inference")
        said = f"waiting for {outage.who} since {outage.clock}" if starts else f"{outage}"
        remarks.append(_text(f"run {run_id}: {said}", "dim" if starts else "red"))
    if history.unreadable:
        remarks.append(_text(f"run {run_id} cannot be read: {history.unreadable}", "red"))
    results = evaluations.in_words(history.evaluations.as_json())
    remarks += [_text(f"run {run_id} evaluation {name}: {text}", "dim") for name, text in results.items()]
    if history.weights is not None:
        remarks.append(_text(f"run {run_id} weights: {history.weights}", "dim"))
    if phases := phases_in_words(sum_phases([history.last_shipped])):
        remarks.append(_text(f"run {run_id} step {history.step}: {phases}", "dim"))
    if agents := agents_in_words(agent_times([history.last_shipped])):
        remarks.append(_text(f"run {run_id} agents: {agents}", "dim"))
    if failures := sum_failures(history.counted):
        example = examples.example(history, failures)
        such_as = f"; such as: {example}" if example else ""
        remarks.append(_text(f"run {run_id} failed rollouts: {failures_in_words(failures)}{such_as}", "yellow"))
    if unanswered := status.inference_failed(run_id):
        remarks.append(_text(f"run {run_id} rollouts without an answer from inference: {unanswered}", "yellow"))
    if (jump := history.shown_jump) is not None:
        remarks.append(_text(f"run {run_id}: {jump}. {mismatch.ADVICE}", "yellow"))
    remarks += [_text(f"run {run_id}: {each}", "yellow") for each in history.early_warnings]
    if advice := history.advice_without_difference:
        remarks.append(_text(f"run {run_id}: {advice}", "yellow"))
    elif history.discarded.get("notable"):
        remarks.append(_text(f"run {run_id}: {in_words(history.discarded)}", "yellow"))
    return remarks


def _runs(status: JobSnapshot) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=str(status.directory), title_justify="left")
    for column in (*TEXT_COLUMNS, *NUMBER_COLUMNS):
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for run_id, history in status.histories.items():
        table.add_row(run_id, status.state_of(run_id), *_numbers(history))
    return table


def _numbers(history: History) -> list[str]:
    shipped, trained = history.last_shipped, history.last_trained
    return [
        history.progress,
        str(trained.get("step", 0)),
        number(shipped.get("reward/mean")),
        history.evaluations.headline or "-",
        number(shipped.get("staleness/mean"), 1),
        milliseconds(shipped.get("event_loop_lag/p99")),
        milliseconds(shipped.get("event_loop_lag/max")),
        scientific(trained.get("mismatch_kl")),
        number(history.tokens_per_second(), 0),
    ]


def _processes(status: JobSnapshot) -> Table:
    """The workers as their supervisor recorded them; without it, their last states."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in PROCESS_COLUMNS:
        table.add_column(column)
    for worker in status.workers:
        pid = worker["pid"]
        alive = {True: "yes", False: "no", None: "-"}[status.is_alive(worker)]
        state = worker["state"] if status.running or pid is None else f"was {worker['state']}"
        notes = "; ".join(note for note in (worker["trouble"], worker["status"]) if note)
        died = "" if state in DIED else f", it {worker['last_death']}"  # else it is said below, in full
        restarts = f"{worker['restarts']}{died}" if worker["restarts"] else "-"
        table.add_row(worker["name"], state, str(pid or "-"), alive, printable(restarts), printable(notes))
    return table


def _text(text: str, style: str) -> Text:
    return Text(printable(text), style)
