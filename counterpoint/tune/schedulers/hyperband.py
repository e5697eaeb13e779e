"""HyperBand: successive halving in brackets that weigh many short trials against few long ones.

Li et al., Hyperband (https://arxiv.org/abs/1603.06560). Trials of a bracket wait for each other, paused, at each milestone. A
result costs O(1), except the last one before a halving, which costs the size of its bracket; this does not grow with the number
of trials.
"""

from __future__ import annotations

import math
from typing import Any

from counterpoint.tune.result import Result
from counterpoint.tune.schedulers.hyperband_bracket import Bracket, first_milestone
from counterpoint.tune.schedulers.metric_scheduler import MetricScheduler
from counterpoint.tune.schedulers.scheduler import Trials
from counterpoint.tune.trial import Trial


class HyperBandScheduler(MetricScheduler):
    """Pauses trials at milestones and stops the worst of each bracket there.

    The brackets of a band are filled one after the other, from `s = 0`, whose few trials run to `max_t` at once, to the one with
    most trials and halvings; then a new band begins. A trial stops at `max_t`, unless `stop_last_trials` is False.
    """

    def __init__(
        self,
        time_attr: str = "training_iteration",
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 81,
        reduction_factor: float = 3,
        stop_last_trials: bool = True,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        self.require(max_t > 0, f"max_t is {max_t}; expected more than 0")
        self.require(reduction_factor > 1, f"reduction_factor is {reduction_factor}; expected more than 1")
        self._max_t = max_t
        self._eta = reduction_factor
        self._stop_last_trials = stop_last_trials
        self._rounds = round(math.log(max_t) / math.log(reduction_factor)) + 1
        self._sizes = [s for s in range(self._rounds) if first_milestone(s, max_t, reduction_factor) > 0]
        self.require(bool(self._sizes), f"max_t is {max_t}; expected at least 1, since milestones are whole numbers")
        self._bands: list[list[Bracket]] = []
        """The brackets that have live trials, or are being filled."""
        self._next_size = 0
        self._filling: Bracket | None = None
        self._bracket_of: dict[str, Bracket] = {}
        self._num_stopped = 0

    def on_trial_add(self, trials: Trials, trial: Trial) -> None:
        """Puts the trial into the bracket that is being filled."""
        super().on_trial_add(trials, trial)
        bracket = self._filling
        if bracket is None or bracket.filled():
            bracket = self._next_bracket()
        bracket.live[trial.trial_id] = None
        self._bracket_of[trial.trial_id] = bracket

    def _next_bracket(self) -> Bracket:
        if self._next_size == 0 or not self._bands:
            self._bands.append([])
        previous, self._filling = self._filling, self._bracket(self._sizes[self._next_size])
        self._bands[-1].append(self._filling)
        self._next_size = (self._next_size + 1) % len(self._sizes)
        if previous is not None:
            self._discard_if_empty(previous)
        return self._filling

    def _bracket(self, s: int) -> Bracket:
        return Bracket(s, self._rounds, self._max_t, self._eta, self._stop_last_trials)

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        """Pauses the trial at its bracket's milestone; the last one there decides for all."""
        observed = self.observed(result)
        if observed is None:
            return self.CONTINUE
        bracket = self._bracket_of.get(trial.trial_id)
        if bracket is None:  # It was dropped at a halving that it has not heard of.
            return self.STOP
        bracket.observe(trial.trial_id, *observed)
        if bracket.goes_on(trial.trial_id):
            return self.CONTINUE
        self._decide(trials, bracket, trial)
        if trial.trial_id not in self._bracket_of:
            return self.STOP
        return self.CONTINUE if bracket.goes_on(trial.trial_id) else self.PAUSE

    def _decide(self, trials: Trials, bracket: Bracket, current: Trial | None) -> None:
        """Halves a bracket whose trials all wait, until one of them may go on, or stops them all after the last milestone."""
        while bracket.waits():
            waiting = list(bracket.live)
            if bracket.halvings:
                dropped = bracket.halve()
                self._num_stopped += len(dropped)
            else:
                dropped = waiting
                bracket.live.clear()
            for trial_id in dropped:
                del self._bracket_of[trial_id]
            others = [trial_id for trial_id in waiting if current is None or trial_id != current.trial_id]
            for trial_id in others:
                if trial_id not in bracket.live:
                    trials.stop_trial(trials.get_trial(trial_id))
                elif bracket.goes_on(trial_id):
                    trials.unpause_trial(trials.get_trial(trial_id))
        self._discard_if_empty(bracket)

    def _discard_if_empty(self, bracket: Bracket) -> None:
        if bracket.live or bracket is self._filling:
            return
        for band in self._bands:
            if bracket in band:
                band.remove(bracket)
        self._bands = [band for index, band in enumerate(self._bands) if band or index == len(self._bands) - 1]

    def on_trial_remove(self, trials: Trials, trial: Trial) -> None:
        """Takes the trial out of its bracket; the others may have waited only for it."""
        bracket = self._bracket_of.pop(trial.trial_id, None)
        if bracket is not None:
            del bracket.live[trial.trial_id]
            self._decide(trials, bracket, None)

    def on_trial_complete(self, trials: Trials, trial: Trial, result: Result) -> None:
        """Does as for a trial that is removed."""
        self.on_trial_remove(trials, trial)

    def choose_trial_to_run(self, trials: Trials) -> Trial | None:
        """A PENDING trial of the oldest band, in it of the bracket that is furthest behind."""
        if not trials.with_status(Trial.PENDING):
            return None
        for band in self._bands:
            for bracket in sorted(band, key=Bracket.completion):
                for trial_id in bracket.live:
                    trial = trials.get_trial(trial_id)
                    startable = trial.status == Trial.PENDING and bracket.goes_on(trial_id)
                    if startable and trials.has_resources_for_trial(trial):
                        return trial
        return None

    def debug_string(self) -> str:
        """How many were stopped, and the brackets."""
        bands = "; ".join(f"[{', '.join(map(str, band))}]" for band in self._bands)
        return f"{self.name}: {self._num_stopped} stopped; brackets {bands}"

    def state(self) -> dict[str, Any]:
        """The brackets and which of them is being filled."""
        filling = [bracket is self._filling for band in self._bands for bracket in band]
        return {
            "bands": [[bracket.state() for bracket in band] for band in self._bands],
            "filling": filling.index(True) if True in filling else None,
            "next_size": self._next_size,
            "num_stopped": self._num_stopped,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""
        self._bands = []
        for band in state["bands"]:
            self._bands.append([self._bracket(saved["s"]) for saved in band])
            for bracket, saved in zip(self._bands[-1], band, strict=True):
                bracket.restore_state(saved)
        brackets = [bracket for band in self._bands for bracket in band]
        self._filling = None if state["filling"] is None else brackets[state["filling"]]
        self._bracket_of = {trial_id: bracket for bracket in brackets for trial_id in bracket.live}
        self._next_size, self._num_stopped = state["next_size"], state["num_stopped"]
