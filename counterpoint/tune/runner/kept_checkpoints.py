"""Which checkpoints of a trial are kept: the newest, the best, and whatever somebody may still restore."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.result import lookup
from counterpoint.tune.trial import Trial


class KeptCheckpoints:
    """Counts who needs a checkpoint; whoever releases it last is told to delete it."""

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()

    def hold(self, checkpoint: Checkpoint | None) -> None:
        """One more needs it."""
        if checkpoint is not None and checkpoint.trial_id:
            self._uses[checkpoint.path] += 1

    def is_held(self, path: str) -> bool:
        """Whether somebody needs it, so that it is there or will be."""
        return path in self._uses

    def release(self, checkpoint: Checkpoint | None) -> Iterator[Checkpoint]:
        """One less needs it; yields it if nobody does. What the user gave with `restore` is never yielded: it has no trial."""
        if checkpoint is None or not checkpoint.trial_id:
            return
        self._uses[checkpoint.path] -= 1
        if not self._uses[checkpoint.path]:
            del self._uses[checkpoint.path]
            yield checkpoint

    def add_to_best(self, trial: Trial, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        """Keeps a checkpoint among the trial's best; yields what is to be deleted."""
        self.hold(checkpoint)
        for again in [each for each in trial.checkpoints if each.path == checkpoint.path]:  # made anew after a restore
            trial.checkpoints.remove(again)
            yield from self.release(again)
        trial.checkpoints.append(checkpoint)
        if trial.keep_checkpoints_num is not None and len(trial.checkpoints) > trial.keep_checkpoints_num:
            worst = min(trial.checkpoints, key=lambda each: score(each, trial.checkpoint_score_attr))
            trial.checkpoints.remove(worst)
            yield from self.release(worst)

    def replace_newest(self, trial: Trial, checkpoint: Checkpoint | None) -> Iterator[Checkpoint]:
        """Makes a checkpoint the one from which the trial resumes; yields what is to be deleted."""
        before, trial.checkpoint = trial.checkpoint, checkpoint
        self.hold(checkpoint)
        yield from self.release(before)


def score(checkpoint: Checkpoint, attribute: str) -> tuple[float, float]:
    """The rank of a checkpoint: higher is better, later is better among equals. One without a number ranks last."""
    sign = -1.0 if attribute.startswith("min-") else 1.0
    value = lookup(checkpoint.result, attribute.removeprefix("min-"))
    is_number = isinstance(value, int | float) and not math.isnan(value)
    return (sign * value if is_number else -math.inf, checkpoint.iteration)
