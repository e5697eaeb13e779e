"""Population based bandits: PBT whose exploration is not random, but the choice of a Gaussian process.

Parker-Holder et al., Provably Efficient Online Hyperparameter Optimization with Population-Based Bandits
(https://arxiv.org/abs/2002.02518). What a configuration has gained in an interval is an observation; a trial that takes another's
state over gets the configuration with the highest upper confidence bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tune.schedulers.gain_model import GainModel
from tune.schedulers.pbt import PopulationBasedTraining
from tune.schedulers.population import Member
from tune.schedulers.scheduler import Trials
from tune.search.spaces import uniform
from tune.search.variants import copied
from tune.trial import Trial


class PB2(PopulationBasedTraining):
    """Takes the arguments of `PopulationBasedTraining`, and `hyperparam_bounds`: by key, the lowest and the highest number.

    A key whose value is a whole number stays one. A key that the configuration lacks is drawn uniformly at first.
    """

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        perturbation_interval: float = 60.0,
        hyperparam_bounds: Mapping[str, Sequence[float]] | None = None,
        quantile_fraction: float = 0.25,
        log_config: bool = True,
        require_attrs: bool = True,
        synch: bool = False,
        custom_explore_fn: Callable[[dict[str, Any]], dict[str, Any]] | str | None = None,
        seed: int = 0,
    ) -> None:
        bounds = dict(hyperparam_bounds or {})
        self.require(bool(bounds), "expected hyperparam_bounds, such as {'lr': [1e-4, 1e-1]}")
        for key, given in bounds.items():
            right = len(given) == 2 and all(isinstance(each, int | float) for each in given) and given[0] < given[1]
            right = right and math.isfinite(float(given[1]) - float(given[0]))
            self.require(
                right, f"hyperparam_bounds/{key} is {given!r}; expected the lowest and the highest number, both finite"
            )
        super().__init__(
            time_attr=time_attr,
            metric=metric,
            mode=mode,
            perturbation_interval=perturbation_interval,
            hyperparam_mutations={key: uniform(low, high) for key, (low, high) in bounds.items()},
            quantile_fraction=quantile_fraction,
            custom_explore_fn=custom_explore_fn,
            log_config=log_config,
            require_attrs=require_attrs,
            synch=synch,
            seed=seed,
        )
        self._bounds = {key: (float(low), float(high)) for key, (low, high) in bounds.items()}
        self._model = GainModel(len(bounds))
        self._before: dict[str, tuple[float, float]] = {}
        """Time and score of each trial at its last comparison."""
        self._pending: dict[str, list[float]] = {}
        """What trials explore now and have not been compared with, by trial."""

    def on_trial_add(self, trials: Trials, trial: Trial) -> None:
        """Explores as PBT does. Refuses a whole number for a key between whose bounds there is none."""
        super().on_trial_add(trials, trial)
        for key, (low, high) in self._bounds.items():
            value = trial.config[key]
            self.require(
                not isinstance(value, int) or math.ceil(low) <= math.floor(high),
                f"{key} is {value!r} in {trial}, and no whole number is within hyperparam_bounds, {low:g} to {high:g}; "
                f"give it as {value}.0",
            )

    def _note(self, trial: Trial, time: float, score: float) -> None:
        before = self._before.get(trial.trial_id)
        self._before[trial.trial_id] = (time, score)
        self._pending.pop(trial.trial_id, None)
        if before is not None and time > before[0]:
            self._model.observe(time, self._place(trial.config), (score - before[1]) / (time - before[0]))

    def _place(self, config: dict[str, Any]) -> list[float]:
        """Where a configuration is within the bounds, each from 0 to 1."""
        return [(float(config[key]) - low) / (high - low) for key, (low, high) in self._bounds.items()]

    def _explored(self, config: dict[str, Any], member: Member, source: Member) -> dict[str, Any]:
        if source.trial_id in self._before:
            self._before[member.trial_id] = self._before[source.trial_id]
        time = member.last_train_time
        place = self._model.best(time, list(self._pending.values()), self._random)
        self._pending[member.trial_id] = place
        changed: dict[str, Any] = copied(config)
        for (key, (low, high)), share in zip(self._bounds.items(), place, strict=True):
            value = low + share * (high - low)
            changed[key] = _whole(value, low, high) if isinstance(config[key], int) else value
        return self._custom(changed)

    def state(self) -> dict[str, Any]:
        """Also what was observed."""
        observed = {"model": self._model.state(), "pending": self._pending}
        return {**super().state(), **observed, "before": {key: list(each) for key, each in self._before.items()}}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""
        super().restore_state(state)
        self._model.restore_state(state["model"])
        self._pending = {key: list(each) for key, each in state["pending"].items()}
        self._before = {key: (each[0], each[1]) for key, each in state["before"].items()}


def _whole(value: float, low: float, high: float) -> int:
    """The whole number within the bounds that is nearest."""
    return min(max(round(value), math.ceil(low)), math.floor(high))
