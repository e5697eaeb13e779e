"""An experiment as search algorithms see it."""

from __future__ import annotations

from typing import Any

from counterpoint.tune.experiment import Experiment
from counterpoint.tune.trial import Trial


class SpaceOnly(Experiment):
    """What search algorithms need of an experiment, and nothing else."""

    def __init__(self, config: dict[str, Any] | None = None, num_samples: int = 1) -> None:
        self.config = {} if config is None else config
        self.num_samples = num_samples

    def make_trial(
        self, trial_id: str, config: dict[str, Any], evaluated_params: dict[str, Any], experiment_tag: str
    ) -> Trial:
        return Trial("m:a", config, trial_id, evaluated_params=evaluated_params, experiment_tag=experiment_tag)
