"""An experiment of `tune` from its directory: trials, their values and scores, and which trial took over which.

`experiment_state.json` has the trials, `result.json` below each their results, and `pbt_global.txt` the copies of a population.
Reading takes no lock and disturbs no tuner. The files may be anything, so all is bounded and checked.
"""

from __future__ import annotations

import os
import re
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.job.reading.rollouts.line_index import shown_name
from counterpoint.job.reading.rollouts.rollout_records import finite_number
from counterpoint.job.reading.rollouts.view import shown_value
from counterpoint.transport.config import IDENTIFIER_PATTERN, Config
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


class Values(Config):
    """The values of a trial from one iteration on, by the order of `parameters`."""

    iteration: int
    """The first result with them is the next one."""
    texts: list[str]
    """Each as text; empty where there is none."""
    numbers: list[float | None]
    """Each as a number; None where it is none."""


class TrialEntry(Config):
    """One trial."""

    trial_id: str
    """Unique in its experiment."""
    status: str
    """PENDING, RUNNING, PAUSED, TERMINATED or ERROR."""
    values: list[Values]
    """Its values over time, oldest first; a further entry for each copy."""
    iteration: int
    """Results that it has reported."""
    score: float | None
    """The metric of its last result."""
    seconds: float | None
    """How long it has trained."""
    failures: int
    """How often it has failed."""
    error: str
    """Its last error in one line, of a traceback what was raised; empty without one."""
    copied_from: str
    """The trial that it took over last; empty if it took over none."""
    iterations: list[int]
    """The iterations of its results, thinned out to at most 1,000."""
    scores: list[float]
    """The metric of each."""


class CopyEntry(Config):
    """One trial took over another's state."""

    trial: str
    """The trial that did."""
    source: str
    """The trial whose state it took."""
    iteration: int
    """The trial's iteration at that time."""
    source_iteration: int
    """The iteration of the state that it took."""


class StatusCount(Config):
    """How many trials have one state."""

    status: str
    """The state of the trials."""
    count: int
    """The number of trials in it."""


class PopulationAnswer(Config):
    """An experiment."""

    name: str
    """The name of the experiment."""
    metric: str
    """The metric by which its trials are compared."""
    mode: str
    """`max` or `min`: whether more of it is better."""
    written: float | None
    """The time when its state was written, in seconds since 1970; None if it has not begun."""
    counts: list[StatusCount]
    """All trials by state."""
    parameters: list[str]
    """The names of what differs between trials."""
    best: str
    """The trial with the best last result; empty before the first."""
    trials: list[TrialEntry]
    """The newest 500 trials."""
    copies: list[CopyEntry]
    """Which trial took over which, oldest first."""
    is_complete: bool
    """Whether all results were read; if not, ask again."""
    problems: list[str]
    """What cannot be read, and why."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy, and the configuration with which the trial went on; empty if that is not known."""

    entry: CopyEntry
    config: dict[str, Any]


def is_experiment(directory: Path) -> bool:
    """Whether a directory is that of an experiment. Raises `OSError`."""
    return any((directory / name).is_file() for name in (FILE, STATE_FILE)) or holds_experiment(directory)


class PopulationReader:
    """Follows one experiment. Not for several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._results: dict[str, TrialResults] = {}
        self._state: tuple[tuple[int, ...], dict[str, Any]] | None = None

    def read(self, until: float) -> PopulationAnswer:
        """Reads what is new, until the moment `until` of `time.monotonic`."""
        state: dict[str, Any] = {}
        written, problems = None, list[str]()
        try:
            state, written = self._read_state()
        except FileNotFoundError:
            pass  # it has not begun
        except (OSError, UntrustedFileError) as error:
            problems.append(f"{STATE_FILE} cannot be read: {_short(error)}")
        name, metric, mode, unreadable = self._named(_dict(state.get("runner")))
        problems[:0] = unreadable
        fields = [trial for trial in _list(state.get("trials")) if _is_trial(trial)]
        counts = Counter(shown_name(trial["status"]) for trial in fields)
        shown = fields[-MOST_TRIALS:]
        parameters = sorted({str(name) for trial in shown for name in _dict(trial.get("evaluated_params"))})
        copies = self._copies(fields, problems)
        known = self._results
        self._results = {}
        is_complete = True
        trials = []
        for trial in shown:
            directory = self._directory_of(trial)
            results = None
            if directory is not None:
                key = f"{metric}\n{directory.name}"
                results = self._results[key] = known.get(key) or TrialResults(directory, metric)
                try:
                    results.advance(until)
                except (OSError, UntrustedFileError) as error:
                    problems.append(f"the results of {trial['trial_id']} cannot be read: {_short(error)}")
                else:
                    is_complete &= results.is_complete
            trials.append(_entry(trial, parameters[:MOST_PARAMETERS], metric, copies, directory, results))
        return PopulationAnswer(
            name=printable(name[:200]),
            metric=printable(metric[:200]),
            mode=mode,
            written=written,
            counts=[StatusCount(status=status, count=count) for status, count in sorted(counts.items())][:20],
            parameters=[printable(name[:200]) for name in parameters[:MOST_PARAMETERS]],
            best=_best(trials, mode),
            trials=trials,
            copies=[copy.entry for copy in copies],
            is_complete=is_complete,
            problems=problems[:20],
        )

    def _named(self, runner: dict[str, Any]) -> tuple[str, str, str, list[str]]:
        """Returns name, metric and mode, by its file if it has one, else by its state; and what cannot be read."""
        try:
            given = read_toml(self._directory / FILE, 2**20)
        except FileNotFoundError:
            given = {}
        except (OSError, UntrustedFileError) as error:
            return self._directory.name, DEFAULT_METRIC, "max", [f"{FILE}: {_short(error)}"]
        name, metric, mode = (given.get(key) or runner.get(key) for key in ("name", "metric", "mode"))
        return (
            name if isinstance(name, str) else self._directory.name,
            metric if isinstance(metric, str) else DEFAULT_METRIC,
            "min" if mode == "min" else "max",
            [],
        )

    def _read_state(self) -> tuple[dict[str, Any], float]:
        """Returns the state, parsed only if it has changed, and when it was written."""
        path = self._directory / STATE_FILE
        found = os.stat(path, follow_symlinks=False)
        identity = (found.st_ino, found.st_mtime_ns, found.st_size)
        if self._state is None or self._state[0] != identity:
            self._state = identity, read_json(path, MAX_STATE_BYTES)
        return self._state[1], found.st_mtime

    def _directory_of(self, fields: dict[str, Any]) -> Path | None:
        """Returns a trial's directory: by its name below the experiment's, which may have been moved; None for a link."""
        name = Path(str(fields.get("logdir", ""))).name
        directory = self._directory / name
        return directory if name and not directory.is_symlink() and directory.is_dir() else None

    def _copies(self, trials: list[dict[str, Any]], problems: list[str]) -> list[_Copy]:
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
            problems.append(f"{COPIES_FILE} cannot be read: {_short(error)}")
            return []
        return [copy for line in data.splitlines()[-MOST_COPIES:] if (copy := _copy(line, ids)) is not None]


def _entry(
    fields: dict[str, Any],
    parameters: Sequence[str],
    metric: str,
    copies: list[_Copy],
    directory: Path | None,
    results: TrialResults | None,
) -> TrialEntry:
    """Returns a trial. Adds to `copies` the one of which only its own directory tells."""
    trial_id, last = fields["trial_id"], _dict(fields.get("last_result"))
    first, config = _dict(fields.get("evaluated_params")), _dict(fields.get("config"))
    own = [copy for copy in copies if copy.entry.trial == trial_id]
    if not own and directory is not None and (note := read_note(directory)) is not None:
        own = [_copied(trial_id, str(note.source), note.iteration, note.iteration, {})]
        copies += own
    values = [_values(0, [first.get(name) for name in parameters])]
    values += [
        _values(copy.entry.iteration, [lookup(copy.config, name) for name in parameters]) for copy in own if copy.config
    ]
    iteration = _whole(last.get(TRAINING_ITERATION))
    now = _values(iteration, [lookup(config, name) for name in parameters])
    if now.texts != values[-1].texts and len(values) == 1:
        values.append(now)
    return TrialEntry(
        trial_id=trial_id,
        status=shown_name(fields["status"]),
        values=values,
        iteration=iteration,
        score=finite_number(lookup(last, metric)),
        seconds=finite_number(last.get(TIME_TOTAL_S)),
        failures=_whole(fields.get("num_failures")),
        error=printable(in_one_line(str(fields.get("error_msg") or ""))[:500]),
        copied_from=own[-1].entry.source if own else "",
        iterations=[] if results is None else results.iterations.tolist(),
        scores=[] if results is None else results.scores.tolist(),
    )


def _best(trials: Sequence[TrialEntry], mode: str) -> str:
    sign = -1.0 if mode == "min" else 1.0
    scored = [(sign * trial.score, trial.trial_id) for trial in trials if trial.score is not None]
    return max(scored, key=lambda one: one[0])[1] if scored else ""


def _values(iteration: int, values: Sequence[Any]) -> Values:
    numbers = [None if isinstance(value, bool) else finite_number(value) for value in values]
    texts = ["" if value is None else shown_value(value, 100, indented=False) for value in values]
    return Values(iteration=iteration, texts=texts, numbers=numbers)


def _copied(trial: str, source: str, iteration: int, source_iteration: int, config: dict[str, Any]) -> _Copy:
    source = printable(source[:64])
    entry = CopyEntry(trial=trial, source=source, iteration=iteration, source_iteration=source_iteration)
    return _Copy(entry, config)


def _copy(line: bytes, ids: dict[str, str]) -> _Copy | None:
    try:
        row = loads(line)
    except JsonError:
        return None
    match row:
        case [str(tag), str(source), int(iteration), int(source_iteration), dict(), dict(config)]:
            known = [ids.get(name.partition("@")[0]) for name in (tag, source)]
            if known[0] is not None and known[1] is not None:
                return _copied(known[0], known[1], iteration, source_iteration, config)
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
