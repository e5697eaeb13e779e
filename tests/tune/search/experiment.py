"""An experiment as search algorithms see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from counterpoint.tune.trial import Trial


@dataclass
class SpaceOnly:
    """The contract `Proposable`, and nothing else."""

    config: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 1

    def make_trial(
        self, trial_id: str, config: dict[str, Any], evaluated_params: dict[str, Any], experiment_tag: str
    ) -> Trial:
        return Trial("m:a", config, trial_id, evaluated_params=evaluated_params, experiment_tag=experiment_tag)
