"""HyperBand for a search that learns, such as BOHB's or TPE: a bracket is halved only once it is full.

Falkner et al., BOHB (https://arxiv.org/abs/1807.01774). The search so sees results of the small budgets before it proposes all
trials of a bracket. The order of brackets and of trials is that of Ray's scheduler of the same name; otherwise it decides as
`HyperBandScheduler`.
"""

from __future__ import annotations

from tune.schedulers.hyperband import HyperBandScheduler
from tune.schedulers.hyperband_bracket import Bracket
from tune.schedulers.scheduler import Trials
from tune.trial import Trial


class HyperBandForBOHB(HyperBandScheduler):
    """Has the trials of a bracket wait, paused, until the bracket is full and all of them are at the milestone.

    A band begins with its largest bracket. A bracket that can never be full is halved as it is: when nothing runs, and the search
    algorithm has ended or waits for results itself, as one does behind a limiter with fewer places than the bracket.
    """

    _largest_first = True

    def _decide(self, trials: Trials, bracket: Bracket, current: Trial | None) -> None:
        if bracket is not self._filling or bracket.filled():
            self._decide_as_it_is(trials, bracket, current)

    def _decide_as_it_is(self, trials: Trials, bracket: Bracket, current: Trial | None) -> None:
        halvings = bracket.halvings
        super()._decide(trials, bracket, current)
        if bracket is self._filling and bracket.halvings < halvings:
            self._filling = None  # a trial that joined now would skip the budgets at which the others were compared
            self._discard_if_empty(bracket)

    def choose_trial_to_run(self, trials: Trials) -> Trial | None:
        """Does as `HyperBandScheduler`; where nothing else can happen, halves the bracket that is not full first."""
        chosen = super().choose_trial_to_run(trials)
        bracket = self._filling
        if chosen is not None or bracket is None or trials.with_status(Trial.RUNNING) or trials.search_may_propose():
            return chosen
        if any(self._goes_on(trial) for trial in trials.with_status(Trial.PENDING)):
            return None  # it waits for resources
        self._decide_as_it_is(trials, bracket, None)
        return super().choose_trial_to_run(trials)

    def _goes_on(self, trial: Trial) -> bool:
        bracket = self._bracket_of.get(trial.trial_id)
        return bracket is not None and bracket.goes_on(trial.trial_id)

    def _turns(self, band: list[Bracket]) -> list[Bracket]:
        return band
