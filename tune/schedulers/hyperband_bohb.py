"""HyperBand for a search that learns, such as BOHB's or TPE: a bracket is halved only once it is full.

Falkner et al., BOHB (https://arxiv.org/abs/1807.01774). The search so sees results of the small budgets before it proposes all
trials of a bracket. Otherwise it decides as `HyperBandScheduler`.
"""

from __future__ import annotations

from tune.schedulers.hyperband import HyperBandScheduler
from tune.schedulers.hyperband_bracket import Bracket
from tune.schedulers.scheduler import Trials
from tune.trial import Trial


class HyperBandForBOHB(HyperBandScheduler):
    """Has the trials of a bracket wait, paused, until the bracket is full and all of them are at the milestone.

    If nothing runs and nothing new is there to start, as after the last proposal, a bracket is halved as it is.
    """

    def _decide(self, trials: Trials, bracket: Bracket, current: Trial | None) -> None:
        if bracket is not self._filling or bracket.filled():
            super()._decide(trials, bracket, current)

    def choose_trial_to_run(self, trials: Trials) -> Trial | None:
        """As `HyperBandScheduler`; when all trials wait for each other in brackets that nobody fills, it halves those first."""
        chosen = super().choose_trial_to_run(trials)
        if chosen is not None or trials.with_status(Trial.RUNNING) or trials.with_status(Trial.PENDING):
            return chosen
        for bracket in [bracket for band in self._bands for bracket in band]:
            super()._decide(trials, bracket, None)
        return super().choose_trial_to_run(trials)
