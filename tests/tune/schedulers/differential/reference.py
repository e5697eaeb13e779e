"""Ray's schedulers, and each deliberate difference (docs/tune.md sums them up) as a correction of its class.

A correction is as small as can be, and calls Ray's method for the rest. Plain streams run against Ray's classes as they are.
"""

from __future__ import annotations

import math
from typing import Any

from ray.tune.schedulers.async_hyperband import AsyncHyperBandScheduler, _Bracket
from ray.tune.schedulers.hyperband import HyperBandScheduler
from ray.tune.schedulers.hyperband import _Bracket as _HyperBandBracket
from ray.tune.schedulers.median_stopping_rule import MedianStoppingRule
from ray.tune.schedulers.pbt import PopulationBasedTraining

from tests.tune.schedulers.differential.world import RayHangsError


class OneDecisionARung(_Bracket):
    """A trial is compared once, at the highest rung that it has reached, and a NaN does not pass where another score did."""

    def on_result(self, trial: Any, cur_iter: float, cur_rew: float) -> str:
        if any(milestone > cur_iter and trial.trial_id in recorded for milestone, recorded in self._rungs):
            return "CONTINUE"  # It went back in time after it had been compared at a later rung.
        reached = [recorded for milestone, recorded in self._rungs if milestone <= cur_iter][:1]
        is_new = any(trial.trial_id not in recorded for recorded in reached)
        others = any(not math.isnan(score) for recorded in reached for score in recorded.values())
        decision: str = super().on_result(trial, cur_iter, cur_rew)
        return "STOP" if math.isnan(cur_rew) and is_new and others else decision


class CorrectedAsha(AsyncHyperBandScheduler):
    """With brackets that decide once a rung."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for bracket in self._brackets:
            bracket.__class__ = OneDecisionARung
            bracket._stop_last_trials = False  # Here it only says whether rungs below are looked at, too.


class CorrectedHyperBand(HyperBandScheduler):
    """Goes on when a trial leaves or when all are past the next milestone; results without time or metric are passed over."""

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if self._time_attr not in result or self._metric not in result:
            return "CONTINUE"
        if math.isnan(result[self._metric]):
            result = {**result, self._metric: -self._metric_op * math.inf}
        decision: str = super().on_trial_result(controller, trial, result)
        return decision

    def on_trial_remove(self, controller: Any, trial: Any) -> None:
        bracket, _ = self._trial_info[trial]
        during_halving = bracket.is_being_processed
        super().on_trial_remove(controller, trial)
        if not during_halving and bracket._live_trials and bracket.finished() and self.decides(bracket):
            bracket.cleanup_full(controller)  # Else they would wait for ever.

    def decides(self, bracket: Any) -> bool:
        return True

    def _process_bracket(self, controller: Any, bracket: Any) -> str:
        action: str = "PAUSE"
        while self.decides(bracket) and bracket._live_trials and action == "PAUSE":
            action = super()._process_bracket(controller, bracket)
            bracket.is_being_processed = False
            if not bracket.cur_iter_done() or not (bracket._halves or bracket.stop_last_trials):
                break
        return action


class ClosedOnceHalved(_HyperBandBracket):
    """Takes no trial once it was halved, and is not waited with when a later bracket is filled instead."""

    scheduler: Any
    halvings: int

    def filled(self) -> bool:
        is_filling = self.scheduler._state["bracket"] is self and self._halves == self.halvings
        return not is_filling or super().filled()


class CorrectedMedian(MedianStoppingRule):
    """The last result counts once, and results that are reported again replace what they repeat. NaN is never the best score."""

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if trial not in self._stopped_trials:
            self.forget_repeated(trial, result)
        decision: str = super().on_trial_result(controller, trial, result)
        return decision

    def on_trial_complete(self, controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if self._time_attr in result and self._metric in result:
            self.forget_repeated(trial, result)
            super().on_trial_complete(controller, trial, result)

    def forget_repeated(self, trial: Any, result: dict[str, Any]) -> None:
        if self._time_attr in result and self._metric in result:
            time = result[self._time_attr]
            self._results[trial] = [old for old in self._results[trial] if old[self._time_attr] < time]

    def _best_result(self, trial: Any) -> float:
        scores = [old[self._metric] for old in self._results[trial] if not math.isnan(old[self._metric])]
        return float(self._compare_op(scores)) if scores else float(self._worst)


class CorrectedPbt(PopulationBasedTraining):
    """NaN is the worst score rather than none. In synchronous mode, says where Ray starts nothing any more.

    A whole number that is multiplied moves by at least one, but not to 0.
    """

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        before = trial_to_clone.config["layers"]
        if operations["layers"].startswith("*"):
            factor = float(operations["layers"].removeprefix("*"))
            if config["layers"] == before and factor != 1:
                config["layers"] += 1 if factor > 1 else -1
            config["layers"] = config["layers"] or before
        return config, operations

    def _save_trial_state(self, state: Any, time: float, result: dict[str, Any], trial: Any) -> float:
        score: float = super()._save_trial_state(state, time, result, trial)
        if math.isnan(score):
            state.last_score = score = -math.inf
        return score

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision: str = super().on_trial_result(controller, trial, result)
        self.check(controller.get_live_trials())
        return decision

    def on_trial_complete(self, controller: Any, trial: Any, result: dict[str, Any]) -> None:
        self.leaves(controller, trial)

    def on_trial_remove(self, controller: Any, trial: Any) -> None:
        self.leaves(controller, trial)

    def on_trial_error(self, controller: Any, trial: Any) -> None:
        self.leaves(controller, trial)

    def leaves(self, controller: Any, trial: Any) -> None:
        self.check([other for other in controller.get_live_trials() if other is not trial])

    def check(self, live: list[Any]) -> None:
        """Nothing starts any more once all have come to the time at which they wait for each other."""
        times = [self._trial_state[trial].last_train_time for trial in live]
        if self._synch and times and all(time >= self._next_perturbation_sync for time in times):
            raise RayHangsError


PLAIN = {
    "asha": AsyncHyperBandScheduler,
    "hyperband": HyperBandScheduler,
    "median": MedianStoppingRule,
    "pbt": PopulationBasedTraining,
    "pbt_synch": PopulationBasedTraining,
}

CORRECTED = {
    "asha": CorrectedAsha,
    "hyperband": CorrectedHyperBand,
    "median": CorrectedMedian,
    "pbt": CorrectedPbt,
    "pbt_synch": CorrectedPbt,
}
