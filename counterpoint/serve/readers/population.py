"""An experiment of `tune` from its directory: trials, their values and scores, and which trial took over which.

`experiment_state.json` has the trials, `result.json` below each their results, and `pbt_global.txt` the copies of a population.
Reading takes no lock and disturbs no tuner. The files may be anything, so all is bounded and checked.
"""

from __future__ import annotations

import os
import re
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.job.inspection.rollout_records import finite_number
from counterpoint.serve.readers.rollouts.line_index import shown_name
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.exact_json import JsonError, loads
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.untrusted import UntrustedFileError, object_in, read_bytes, read_json, read_toml
from counterpoint.transport.printable import printable
from counterpoint.tune.callbacks.json_logger import RESULT_FILE
from counterpoint.tune.errors import in_one_line
from counterpoint.tune.file_experiment import FILE
from counterpoint.tune.result import DEFAULT_METRIC, TIME_TOTAL_S, TRAINING_ITERATION, lookup
from counterpoint.tune.runner.journal import holds_experiment
from counterpoint.tune.runner.trial_files import STATE_FILE
from counterpoint.tune.runs.exploit import read_note

MAX_STATE_BYTES = 128 * 2**20
MAX_COPIES_BYTES = 16 * 2**20
COPIES_FILE = "pbt_global.txt"

MOST_TRIALS = 500
"""Trials that are shown, the newest; all are counted."""

MOST_COPIES = 5_000

MOST_PARAMETERS = 32

MOST_POINTS = 1_000
"""Points of one trial that are kept: beyond, every second one is dropped, and so on."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One trial took over another's state."""

    trial: str
    source: str
    iteration: int
    """The trial's iteration when it did."""
    source_iteration: int
    """The iteration of the source's checkpoint."""
    config: dict[str, Any]
    """The configuration with which the trial went on; empty if it is not known."""


@dataclass(slots=True)
class TrialState:
    """One trial."""

    trial_id: str
    status: str
    first_values: dict[str, Any]
    """What the search chose, by flat name."""
    values: dict[str, Any]
    """What it has now."""
    iteration: int
    score: float | None
    seconds: float | None
    failures: int
    error: str
    copied_from: str
    results: TrialResults | None = None


@dataclass(slots=True)
class Population:
    """An experiment as it was at one moment."""

    name: str
    metric: str
    mode: str
    written: float | None = None
    """The time when its state was written, in seconds since 1970; None before the first time."""
    parameters: list[str] = field(default_factory=list)
    """The names of what differs between trials."""
    counts: dict[str, int] = field(default_factory=dict)
    """The number of trials in each state."""
    trials: list[TrialState] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    is_complete: bool = True
    """Whether all results were read; a later call goes on."""


def is_experiment(directory: Path) -> bool:
    """Whether a directory is that of an experiment. Raises `OSError`."""
    return any((directory / name).is_file() for name in (FILE, STATE_FILE)) or holds_experiment(directory)


class PopulationReader:
    """Follows one experiment. Not for several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._results: dict[str, TrialResults] = {}
        self._state: tuple[tuple[int, ...], dict[str, Any]] | None = None

    def read(self, until: float) -> Population:
        """Reads what is new, until the moment `until` of `time.monotonic`."""
        state: dict[str, Any] = {}
        written, problems = None, []
        try:
            state, written = self._read_state()
        except FileNotFoundError:
            pass  # it has not begun
        except (OSError, UntrustedFileError) as error:
            problems.append(f"{STATE_FILE} cannot be read: {_short(error)}")
        population = self._named(_dict(state.get("runner")))
        population.written = written
        population.problems += problems
        fields = [trial for trial in _list(state.get("trials")) if _is_trial(trial)]
        for trial in fields:
            status = shown_name(trial["status"])
            population.counts[status] = population.counts.get(status, 0) + 1
        shown = fields[-MOST_TRIALS:]
        names = {str(name) for trial in shown for name in _dict(trial.get("evaluated_params"))}
        population.parameters = sorted(names)[:MOST_PARAMETERS]
        population.copies = self._copies(fields, population)
        population.trials = [self._trial(trial, population) for trial in shown]
        self._follow(population, until)
        return population

    def _named(self, runner: dict[str, Any]) -> Population:
        """Returns it without trials: by its file if it has one, else by its state."""
        try:
            given = read_toml(self._directory / FILE, 2**20)
        except FileNotFoundError:
            given = {}
        except (OSError, UntrustedFileError) as error:
            return Population(self._directory.name, DEFAULT_METRIC, "max", problems=[f"{FILE}: {_short(error)}"])
        name, metric, mode = (given.get(key) or runner.get(key) for key in ("name", "metric", "mode"))
        return Population(
            name if isinstance(name, str) else self._directory.name,
            metric if isinstance(metric, str) else DEFAULT_METRIC,
            "min" if mode == "min" else "max",
        )

    def _read_state(self) -> tuple[dict[str, Any], float]:
        """Returns the state, parsed only if it has changed, and when it was written."""
        path = self._directory / STATE_FILE
        found = os.stat(path, follow_symlinks=False)
        identity = (found.st_ino, found.st_mtime_ns, found.st_size)
        if self._state is None or self._state[0] != identity:
            self._state = identity, read_json(path, MAX_STATE_BYTES)
        return self._state[1], found.st_mtime

    def _trial(self, fields: dict[str, Any], population: Population) -> TrialState:
        trial_id, last = fields["trial_id"], _dict(fields.get("last_result"))
        first, config = _dict(fields.get("evaluated_params")), _dict(fields.get("config"))
        copies = [copy for copy in population.copies if copy.trial == trial_id]
        directory = self._directory_of(fields)
        if not copies and directory is not None and (note := read_note(directory)) is not None:
            population.copies.append(Copy(trial_id, str(note.source), note.iteration, note.iteration, {}))
            copies = population.copies[-1:]
        return TrialState(
            trial_id=trial_id,
            status=shown_name(fields["status"]),
            first_values={name: first.get(name) for name in population.parameters},
            values={name: lookup(config, name) for name in population.parameters},
            iteration=_whole(last.get(TRAINING_ITERATION)),
            score=finite_number(lookup(last, population.metric)),
            seconds=finite_number(last.get(TIME_TOTAL_S)),
            failures=_whole(fields.get("num_failures")),
            error=printable(in_one_line(str(fields.get("error_msg") or ""))[:500]),
            copied_from=copies[-1].source if copies else "",
            results=self._results_of(trial_id, directory, population.metric),
        )

    def _directory_of(self, fields: dict[str, Any]) -> Path | None:
        """Returns a trial's directory: by its name below the experiment's, which may have been moved; None for a link."""
        name = Path(str(fields.get("logdir", ""))).name
        directory = self._directory / name
        return directory if name and not directory.is_symlink() and directory.is_dir() else None

    def _results_of(self, trial_id: str, directory: Path | None, metric: str) -> TrialResults | None:
        if directory is None:
            return None
        key = f"{metric}\n{directory.name}"
        if key not in self._results:
            self._results[key] = TrialResults(directory, metric)
        return self._results[key]

    def _follow(self, population: Population, until: float) -> None:
        used = {id(trial.results) for trial in population.trials}
        self._results = {key: results for key, results in self._results.items() if id(results) in used}
        for trial in population.trials:
            if trial.results is not None:
                try:
                    trial.results.advance(until)
                except (OSError, UntrustedFileError) as error:
                    population.problems.append(f"the results of {trial.trial_id} cannot be read: {_short(error)}")
                else:
                    population.is_complete &= trial.results.is_complete

    def _copies(self, trials: list[dict[str, Any]], population: Population) -> list[Copy]:
        """Reads the copies in the log of the population, whose rows name trials by the tags with which they joined."""
        ids = {
            str(trial.get("experiment_tag") or trial["trial_id"]).partition("@")[0]: trial["trial_id"]
            for trial in trials
        }
        try:
            data = read_bytes(self._directory / COPIES_FILE, MAX_COPIES_BYTES)
        except FileNotFoundError:
            return []
        except (OSError, UntrustedFileError) as error:
            population.problems.append(f"{COPIES_FILE} cannot be read: {_short(error)}")
            return []
        copies = [copy for line in data.splitlines()[-MOST_COPIES:] if (copy := _copy(line, ids)) is not None]
        return copies


def _copy(line: bytes, ids: dict[str, str]) -> Copy | None:
    try:
        row = loads(line)
    except JsonError:
        return None
    match row:
        case [str(tag), str(source), int(iteration), int(source_iteration), dict(), dict(config)]:
            known = [ids.get(name.partition("@")[0]) for name in (tag, source)]
            if known[0] is not None and known[1] is not None:
                return Copy(known[0], known[1], iteration, source_iteration, config)
    return None


def _is_trial(trial: object) -> bool:
    return (
        isinstance(trial, dict)
        and isinstance(trial.get("status"), str)
        and isinstance(trial.get("trial_id"), str)
        and re.fullmatch(IDENTIFIER_PATTERN, trial["trial_id"]) is not None
    )


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**53 else 0


def _short(error: Exception) -> str:
    """Returns the reason without paths of this machine."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else "it is not what the tuner writes"


class TrialResults:
    """The results in one trial's directory, followed as they are appended: its score at each iteration."""

    def __init__(self, directory: Path, metric: str) -> None:
        self._metric = metric
        self._lines = AppendedLines(directory / RESULT_FILE)
        self._begin()

    def _begin(self) -> None:
        self.iterations = array("q")
        self.scores = array("d")
        self._every = 1
        """The divisor of the numbers of those results that are kept."""
        self._count = 0
        self.is_complete = False

    def advance(self, until: float) -> None:
        """Reads what was appended, until the moment `until` of `time.monotonic`. Raises `OSError` and `UntrustedFileError`."""
        self.is_complete = False
        for _, block in self._lines.new_blocks(self._begin):
            for line in block.splitlines():
                self._add(line)
            if time.monotonic() >= until:
                return
        self.is_complete = True

    def _add(self, line: bytes) -> None:
        if (result := object_in(line)) is None:
            return
        iteration, score = result.get(TRAINING_ITERATION), finite_number(lookup(result, self._metric))
        if type(iteration) is not int or not 0 <= iteration < 2**53 or score is None:
            return
        self._count += 1
        if self._count % self._every == 0:
            self.iterations.append(iteration)
            self.scores.append(score)
        if len(self.iterations) >= MOST_POINTS:
            self.iterations, self.scores = self.iterations[1::2], self.scores[1::2]
            self._every *= 2
