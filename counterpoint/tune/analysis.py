"""What came of an experiment: its trials and their results, from a live experiment or its directory alone. As Ray Tune 1.x's.

Of a directory, `experiment_state.json` says which trials there are; trials that it does not name yet (it is written every few
seconds), or all if there is none, are taken from the directories that hold a `params.json`. What a trial reported before its
last result is read from its `result.json` whenever it is asked for. Reading disturbs no experiment that runs.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from counterpoint.transport.files.json_lines import read_lines
from counterpoint.transport.files.untrusted import read_json
from counterpoint.tune.callbacks.json_logger import PARAMS_FILE, RESULT_FILE
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import TRAINING_ITERATION, TRIAL_ID, Result, flattened, number_in
from counterpoint.tune.trial import TRAINABLE_OF_RUNS, Trial

Scope = Literal["last", "all", "avg", "last-5-avg", "last-10-avg"]

_LAST_SO_MANY = {"last": 1, "last-5-avg": 5, "last-10-avg": 10}
_LARGEST_STATE = 2**30
_LARGEST_PARAMS = 64 * 2**20


class Analysis:
    """The trials of an experiment and what they reported.

    Args:
        experiment_dir: The experiment's directory.
        trials: Its trials, if the experiment runs in this process; else they are read from the directory.
        default_metric: The metric where none is given.
        default_mode: `min` or `max` where neither is given.

    Raises:
        TuneError: `experiment_dir` is no directory.
    """

    def __init__(
        self,
        experiment_dir: str | Path,
        trials: Sequence[Trial] | None = None,
        default_metric: str | None = None,
        default_mode: str | None = None,
    ) -> None:
        self.directory = Path(experiment_dir).expanduser()
        if trials is None and not self.directory.is_dir():
            raise TuneError(
                f"{self.directory} is no directory; expected that of an experiment, with a directory for each trial"
            )
        self.trials = _trials_in(self.directory) if trials is None else list(trials)
        self.default_metric, self.default_mode = default_metric, default_mode

    # --- the best ---

    @property
    def best_trial(self) -> Trial:
        """The best trial by its last result. Raises `TuneError` if there is none."""
        return self._best(None, None, "last")

    @property
    def best_config(self) -> dict[str, Any]:
        """The configuration of the best trial."""
        return self.best_trial.config

    @property
    def best_logdir(self) -> str:
        """The directory of the best trial."""
        return self.best_trial.logdir

    @property
    def best_result(self) -> Result:
        """The last result of the best trial."""
        return self.best_trial.last_result

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """Its best checkpoint by the default metric; None if it has none."""
        return self.get_best_checkpoint(self.best_trial)

    @property
    def best_dataframe(self) -> Any:
        """Its results as a table of pandas."""
        return self._table(self.results_of(self.best_trial))

    def get_best_trial(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: Scope = "last",
        filter_nan_and_inf: bool = True,
    ) -> Trial | None:
        """The trial with the best metric; None if none has reported it.

        Args:
            metric: By default `default_metric`.
            mode: By default `default_mode`.
            scope: `last` compares last results, `all` each trial's best, `avg` the mean of its results, `last-5-avg` and
                `last-10-avg` the mean of its last ones.
            filter_nan_and_inf: Passes over values that are not finite; else they count as they are.
        """
        metric, largest = self._metric(metric), self._mode(mode) == "max"
        best: tuple[float, Trial] | None = None
        for trial in self.trials:
            value = self._score(trial, metric, largest, scope, filter_nan_and_inf)
            if value is not None and (best is None or (value > best[0] if largest else value < best[0])):
                best = value, trial
        return None if best is None else best[1]

    def get_best_config(
        self, metric: str | None = None, mode: str | None = None, scope: Scope = "last"
    ) -> dict[str, Any] | None:
        """The configuration of `get_best_trial`."""
        trial = self.get_best_trial(metric, mode, scope)
        return None if trial is None else trial.config

    def get_best_logdir(self, metric: str | None = None, mode: str | None = None, scope: Scope = "last") -> str | None:
        """The directory of `get_best_trial`."""
        trial = self.get_best_trial(metric, mode, scope)
        return None if trial is None else trial.logdir

    def get_best_checkpoint(
        self, trial: Trial, metric: str | None = None, mode: str | None = None
    ) -> Checkpoint | None:
        """The trial's checkpoint with the best metric at the time, the later of equals; None if no checkpoint has it."""
        name, largest = self._metric(metric), self._mode(mode) == "max"
        scored = [
            (value if largest else -value, checkpoint.iteration, checkpoint)
            for checkpoint, value in self.get_trial_checkpoints(trial, name)
            if value is not None
        ]
        return max(scored, key=lambda one: one[:2])[2] if scored else None

    def get_last_checkpoint(
        self, trial: Trial | None = None, metric: str = TRAINING_ITERATION, mode: str = "max"
    ) -> Checkpoint | None:
        """The newest checkpoint of the trial; without one, of that with the best metric, which is by default the longest."""
        trial = self.get_best_trial(metric, mode) if trial is None else trial
        if trial is None:
            return None
        checkpoints = [checkpoint for checkpoint, _ in self.get_trial_checkpoints(trial, TRAINING_ITERATION)]
        return max(checkpoints, key=lambda checkpoint: checkpoint.iteration, default=None)

    def get_trial_checkpoints(self, trial: Trial, metric: str | None = None) -> list[tuple[Checkpoint, float | None]]:
        """The trial's checkpoints that are still there, oldest first, each with the metric of the result before it."""
        name = self._metric(metric)
        known = {checkpoint.path: checkpoint for checkpoint in trial.checkpoints}
        if trial.checkpoint is not None:
            known.setdefault(trial.checkpoint.path, trial.checkpoint)
        there = [each for each in known.values() if "://" in each.path or Path(each.path).exists()]
        return [
            (checkpoint, number_in(checkpoint.result, name))
            for checkpoint in sorted(there, key=lambda each: each.iteration)
        ]

    def get_trial_checkpoints_paths(self, trial: Trial, metric: str | None = None) -> list[tuple[str, float | None]]:
        """The directories of `get_trial_checkpoints`, each with its metric."""
        return [(checkpoint.path, value) for checkpoint, value in self.get_trial_checkpoints(trial, metric)]

    # --- all ---

    @property
    def results(self) -> dict[str, Result]:
        """The last result of each trial, by trial id."""
        return {trial.trial_id: trial.last_result for trial in self.trials}

    def results_of(self, trial: Trial) -> list[Result]:
        """All results of a trial, in order."""
        return [result for _, result in read_lines(Path(trial.logdir, RESULT_FILE))]

    def get_all_configs(self, prefix: bool = False) -> dict[str, dict[str, Any]]:
        """The configuration of each trial, by directory; with `prefix` under names that begin with `config/`."""
        return {
            trial.logdir: {f"config/{key}": value for key, value in trial.config.items()} if prefix else trial.config
            for trial in self.trials
        }

    @property
    def results_df(self) -> Any:
        """The last results as a table of pandas, a row for each trial, by trial id."""
        rows = [
            {**flattened(trial.last_result), **_named_config(trial), TRIAL_ID: trial.trial_id} for trial in self.trials
        ]
        return self._table(rows, index=TRIAL_ID)

    @property
    def best_result_df(self) -> Any:
        """The last result of the best trial as a table of pandas of one row, by trial id."""
        return self.results_df.loc[[self.best_trial.trial_id]]

    def fetch_trial_dataframes(self) -> dict[str, Any]:
        """Does as `trial_dataframes`, which reads the files whenever it is asked."""
        return self.trial_dataframes

    @property
    def trial_dataframes(self) -> dict[str, Any]:
        """All results of each trial as a table of pandas, by directory."""
        return {trial.logdir: self._table(self.results_of(trial)) for trial in self.trials}

    def dataframe(self, metric: str | None = None, mode: str | None = None) -> Any:
        """A table of pandas with a row for each trial: its last result, and its configuration under `config/...`.

        With a metric and a mode it is the result in which the metric was best.
        """
        largest = mode if mode is None else self._mode(mode) == "max"
        rows = []
        for trial in self.trials:
            result = trial.last_result
            if metric is not None and largest is not None:
                result = _best_of(self.results_of(trial), metric, largest) or {}
            rows.append({**flattened(result), **_named_config(trial), "logdir": trial.logdir})
        return self._table(rows)

    def stats(self) -> dict[str, Any]:
        """How the experiment went: trials by status, results, failures, and seconds of training in all."""
        statuses = [trial.status for trial in self.trials]
        return {
            "trials": len(self.trials),
            "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
            "results": sum(trial.num_results for trial in self.trials),
            "failures": sum(trial.num_failures for trial in self.trials),
            "time_total_s": math.fsum(number_in(trial.last_result, "time_total_s") or 0 for trial in self.trials),
        }

    # --- what these share ---

    def _best(self, metric: str | None, mode: str | None, scope: Scope) -> Trial:
        trial = self.get_best_trial(metric, mode, scope)
        if trial is None:
            raise TuneError(
                f"none of the {len(self.trials)} trials in {self.directory} has a finite number for {self._metric(metric)!r} "
                "in its last result; get_best_trial(scope='all') also looks at earlier ones"
            )
        return trial

    def _score(self, trial: Trial, metric: str, largest: bool, scope: Scope, finite: bool) -> float | None:
        if scope == "last":
            return number_in(trial.last_result, metric, finite=finite)
        if scope not in ("all", "avg", *_LAST_SO_MANY):
            raise TuneError(f"scope is {scope!r}; expected last, all, avg, last-5-avg or last-10-avg")
        values = [number_in(result, metric, finite=finite) for result in self.results_of(trial)]
        numbers = [value for value in values if value is not None]
        if not numbers:
            return None
        if scope == "all":
            return max(numbers) if largest else min(numbers)
        numbers = numbers[-_LAST_SO_MANY.get(scope, len(numbers)) :]
        return math.fsum(numbers) / len(numbers)

    def _metric(self, metric: str | None) -> str:
        if not (metric or self.default_metric):
            raise TuneError("no metric: give one, or default_metric to Analysis or metric to run()")
        return metric or self.default_metric or ""

    def _mode(self, mode: str | None) -> str:
        mode = mode or self.default_mode
        if mode not in ("min", "max"):
            raise TuneError(f"mode is {mode!r}; expected 'min' or 'max', here or as default_mode")
        return mode

    def _table(self, rows: Iterable[Result], index: str | None = None) -> Any:
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise TuneError("tables need the package pandas: pip install pandas") from error
        table = pandas.DataFrame.from_records([flattened(row) for row in rows])
        return table if index is None or table.empty else table.set_index(index)


ExperimentAnalysis = Analysis
"""Ray Tune 1.x's name of it."""


def _trials_in(directory: Path) -> list[Trial]:
    """The trials of a directory, those that its state names first, in their order."""
    named: list[Trial] = []
    state = directory / "experiment_state.json"
    if state.exists():
        named = [_trial_of(fields, directory) for fields in read_json(state, _LARGEST_STATE).get("trials", [])]
    known = {Path(trial.logdir).name for trial in named}
    others = sorted(path.parent for path in directory.glob(f"*/{PARAMS_FILE}") if path.parent.name not in known)
    trials = [*named, *(_bare_trial(path) for path in others)]
    for trial in trials:
        _bring_up_to_date(trial)
    return trials


def _trial_of(fields: dict[str, Any], directory: Path) -> Trial:
    """A trial of the state file, whose directory may have been moved since."""
    from counterpoint.tune.runner.codec import trial_of

    known = {name: value for name, value in fields.items() if name in Trial.__dataclass_fields__}
    before = Path(fields["logdir"])
    trial = trial_of(known | {"local_dir": str(directory.absolute()), "dirname": before.name})

    def moved(checkpoint: Checkpoint) -> Checkpoint:
        path = Path(checkpoint.path)
        if "://" in checkpoint.path or not path.is_relative_to(before):
            return checkpoint
        return replace(checkpoint, path=str(Path(trial.logdir) / path.relative_to(before)))

    trial.checkpoints = [moved(each) for each in trial.checkpoints]
    trial.checkpoint = None if trial.checkpoint is None else moved(trial.checkpoint)
    return trial


def _bare_trial(directory: Path) -> Trial:
    """A trial of which there is only its directory, such as one of Ray Tune."""
    parent, name = str(directory.absolute().parent), directory.name
    trial = Trial(TRAINABLE_OF_RUNS, local_dir=parent, dirname=name, trial_id=name)
    trial.trainable_name = ""  # which is not known here
    trial.config = read_json(directory / PARAMS_FILE, _LARGEST_PARAMS)
    return trial


def _bring_up_to_date(trial: Trial) -> None:
    """The files of a trial may be ahead of the state file."""
    count, last = 0, None
    for _, line in read_lines(Path(trial.logdir, RESULT_FILE)):
        count, last = count + 1, line
    if last is not None and count > trial.num_results:
        trial.num_results, trial.last_result = count, last
        trial.trial_id = str(last.get(TRIAL_ID, trial.trial_id))


def _named_config(trial: Trial) -> dict[str, Any]:
    return flattened({"config": trial.config})


def _best_of(results: Iterable[Result], metric: str, largest: bool) -> Result | None:
    scored = [(value, result) for result in results if (value := number_in(result, metric)) is not None]
    if not scored:
        return None
    return (max if largest else min)(scored, key=lambda one: one[0])[1]
