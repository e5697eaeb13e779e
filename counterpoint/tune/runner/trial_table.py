"""The trials of an experiment by id and by status, so that no event walks over all of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable

from counterpoint.tune.runner.events import needs_of
from counterpoint.tune.runner.progress import TrialProgress
from counterpoint.tune.trial import LONGEST_DIRECTORY_NAME, Trial


class TrialTable:
    """The trials in the order of creation; `move` keeps what is indexed right."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self._directories: set[str] = set()
        self._by_status: dict[str, dict[str, Trial]] = defaultdict(dict)
        self._progress: dict[str, TrialProgress] = {}
        self._startable: dict[str, dict[str, list[int]]] = {Trial.PENDING: {}, Trial.PAUSED: {}}
        """The indexes of trials that can start, in order, by status and needs."""

    def add(self, trial: Trial, progress: TrialProgress | None = None) -> TrialProgress:
        """Adds a trial after all others, with its status. Raises `ValueError` for an id that is taken.

        A trial whose directory is another's gets one with its id in the name: no two trials write to one.
        """
        if trial.trial_id in self._progress:
            raise ValueError(f"there are two trials with the id {trial.trial_id!r}")
        if trial.logdir in self._directories:
            trial.dirname = f"{trial.dirname[: LONGEST_DIRECTORY_NAME - len(trial.trial_id) - 1]}_{trial.trial_id}"
        while trial.logdir in self._directories:
            trial.dirname += "_"
        self._directories.add(trial.logdir)
        progress = progress or TrialProgress(len(self.trials), needs_of(trial))
        self.trials.append(trial)
        self._progress[trial.trial_id] = progress
        self._enter(trial, progress)
        return progress

    def get(self, trial_id: str) -> tuple[Trial, TrialProgress] | None:
        """The trial of an id."""
        progress = self._progress.get(trial_id)
        return None if progress is None else (self.trials[progress.index], progress)

    def progress(self, trial: Trial) -> TrialProgress:
        """What is known of a trial of this experiment. Raises `KeyError` for another."""
        return self._progress[trial.trial_id]

    def move(self, trial: Trial, status: str) -> None:
        """Gives a trial another status."""
        if trial.status == status:
            return
        progress = self._progress[trial.trial_id]
        del self._by_status[trial.status][trial.trial_id]
        if (by_needs := self._startable.get(trial.status)) is not None:
            indexes = by_needs[progress.needs]
            del indexes[bisect_left(indexes, progress.index)]
            if not indexes:
                del by_needs[progress.needs]
        trial.status = status
        self._enter(trial, progress)

    def first(self, status: str, needs: Iterable[str]) -> Trial | None:
        """The first trial that is PENDING or PAUSED and needs no more than what one of the keys names."""
        by_needs = self._startable[status]
        firsts = [by_needs[key][0] for key in needs if key in by_needs]
        return self.trials[min(firsts)] if firsts else None

    def examples(self) -> dict[str, Trial]:
        """Returns one trial for each different need of those that are PENDING or PAUSED."""
        return {
            key: self.trials[indexes[0]] for by_needs in self._startable.values() for key, indexes in by_needs.items()
        }

    @property
    def unfinished(self) -> int:
        """How many trials are not TERMINATED and not in ERROR."""
        return len(self.trials) - self.count(Trial.TERMINATED) - self.count(Trial.ERROR)

    def count(self, status: str) -> int:
        """How many trials have a status."""
        return len(self._by_status[status])

    def with_status(self, status: str) -> Collection[Trial]:
        """The trials of a status, in no particular order."""
        return self._by_status[status].values()

    def _enter(self, trial: Trial, progress: TrialProgress) -> None:
        self._by_status[trial.status][trial.trial_id] = trial
        if (by_needs := self._startable.get(trial.status)) is not None:
            insort(by_needs.setdefault(progress.needs, []), progress.index)
