"""What one call of `run` describes: a trainable, the space of its configurations, and how each trial of it is treated.

A search algorithm is given experiments (`SearchAlg.add_configurations`) and makes trials of them with `Experiment.make_trial`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.tune.errors import TuneError
from counterpoint.tune.export_formats import check_formats
from counterpoint.tune.json_values import as_json
from counterpoint.tune.resources import Resources, resources_of
from counterpoint.tune.trial import DEFAULT_RESULTS_DIRECTORY, Trial, check_counts, checked_criteria


class Experiment:
    """One experiment. The arguments are those of Ray Tune 1.x's `Experiment`.

    `run` is a name given to `register_trainable`, an import path `module:name`, or what `tune.registry.trainable_name` accepts: a
    function or a `Trainable` class. `stop` is a dict of metrics and values, or whatever `tune.stoppers` makes a stopper of.
    Raises `TuneError` for what cannot be used.
    """

    def __init__(
        self,
        name: str | None,
        run: str | Callable[..., Any] | type,
        stop: Any = None,
        config: Mapping[str, Any] | None = None,
        resources_per_trial: Resources | Mapping[str, Any] | None = None,
        num_samples: int = 1,
        local_dir: str | None = None,
        checkpoint_freq: int = 0,
        checkpoint_at_end: bool = False,
        keep_checkpoints_num: int | None = None,
        checkpoint_score_attr: str | None = None,
        export_formats: list[str] | None = None,
        max_failures: int = 0,
        restore: str | None = None,
        trial_name_creator: Callable[[Trial], str] | None = None,
        trial_dirname_creator: Callable[[Trial], str] | None = None,
        log_to_file: bool | str | tuple[str, str] = False,
    ) -> None:
        self.run_identifier = run if isinstance(run, str) else _name_of(run)
        short = re.sub(r"\W", "_", self.run_identifier.rpartition(":")[2].rpartition(".")[2])[:32] or "experiment"
        self.name = name or f"{short}_{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
        if not re.match(IDENTIFIER_PATTERN, self.name):
            raise TuneError(f"name = {name!r}: expected up to 64 letters, digits, '_', '.' and '-', the first no sign")
        self.local_dir = str(Path(local_dir or DEFAULT_RESULTS_DIRECTORY).expanduser().absolute())
        self.stopping_criteria, self.stopper = _criteria(stop)
        self.config: dict[str, Any] = dict(config or {})
        self.resources = resources_of(resources_per_trial, "resources_per_trial")
        self.num_samples = num_samples
        """How often the whole space is sampled; -1 for without end."""
        if num_samples < 1 and num_samples != -1:
            raise TuneError(f"num_samples = {num_samples}: expected 1 or more, or -1 for without end")
        check_counts(checkpoint_freq, keep_checkpoints_num, max_failures)
        self.checkpoint_freq = checkpoint_freq
        self.checkpoint_at_end = checkpoint_at_end
        self.keep_checkpoints_num = keep_checkpoints_num
        self.checkpoint_score_attr = checkpoint_score_attr or "training_iteration"
        self.export_formats = check_formats(export_formats)
        self.max_failures = max_failures
        self.restore = None if restore is None else str(Path(restore).expanduser().absolute())
        self.trial_name_creator = trial_name_creator
        self.trial_dirname_creator = trial_dirname_creator
        self.log_to_file = log_to_file

    @property
    def directory(self) -> str:
        """The directory of the experiment's state and of its trials' directories."""
        return str(Path(self.local_dir) / self.name)

    def make_trial(
        self, trial_id: str, config: dict[str, Any], evaluated_params: dict[str, Any], experiment_tag: str
    ) -> Trial:
        """Returns a trial of this experiment, PENDING. Raises `TuneError` for a configuration that is no JSON."""
        trial = Trial(
            trainable_name=self.run_identifier,
            config=as_json(config, finite=False),
            trial_id=trial_id,
            local_dir=self.directory,
            evaluated_params=evaluated_params,
            experiment_tag=experiment_tag,
            resources=self.resources,
            stopping_criterion=dict(self.stopping_criteria),
            checkpoint_freq=self.checkpoint_freq,
            checkpoint_at_end=self.checkpoint_at_end,
            keep_checkpoints_num=self.keep_checkpoints_num,
            checkpoint_score_attr=self.checkpoint_score_attr,
            export_formats=list(self.export_formats),
            restore_path=self.restore,
            log_to_file=self.log_to_file,
            trial_name_creator=self.trial_name_creator,
            trial_dirname_creator=self.trial_dirname_creator,
            max_failures=self.max_failures,
        )
        trial.dirname = trial.dirname or trial.named_by_tag()
        return trial


def _criteria(stop: Any) -> tuple[dict[str, float], Any]:
    """The criteria that each trial carries, and what else was given, for `tune.stoppers`."""
    if stop is None:
        return {}, None
    if not isinstance(stop, Mapping):
        return {}, stop
    return checked_criteria(stop, "stop"), None


def _name_of(run: Callable[..., Any] | type) -> str:
    registry = importlib.import_module("counterpoint.tune.registry")  # which imports trainables; a name needs none
    name: str = registry.trainable_name(run)
    return name
