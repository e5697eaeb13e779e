"""Steps that begin before their commit: the trainer computes gradients while the orchestrator's record is on its way to the disk.

A batch comes before its commit (`docs/contracts.md`, "Commits"). Rows are trained meanwhile, which changes no weights. The step
is opened for good, and so acknowledged, updated and published, only with the commit of this very batch. Where that never comes,
or another batch or a copy is due by then, what has begun is dropped: the run is as before the step.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from counterpoint.trainer.fair_share import FairShare
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.runs.copies import CopyRefused
from counterpoint.trainer.runs.requested import Requests
from counterpoint.trainer.runs.run import Run
from counterpoint.transport.records import Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that has begun."""

    batch: Batch
    at: float
    """When it began, on the monotonic clock, in seconds."""


class EarlySteps:
    """The steps of all runs that have begun and are not committed; on rank 0."""

    def __init__(self, learner: Learner, requests: Requests, shares: FairShare) -> None:
        """The learner trains their samples, in the rows that `shares` plans."""
        self._learner = learner
        self._requests = requests
        self._shares = shares
        self._begun: dict[int, _Begun] = {}
        """By slot."""
        self._refused: dict[int, Batch] = {}
        """By slot, the last batch that could not begin early."""

    @property
    def have_rows(self) -> bool:
        """Whether any of them has samples to train."""
        return any(map(self._shares.left, self._begun))

    def begin(self, run: Run) -> None:
        """Begins the next step of a run, which has no open one, if its batch is there; drops one whose batch is gone."""
        step = run.progress.step + 1
        batch, begun = run.waiting.get(step), self._begun.get(run.slot)
        if begun is not None and begun.batch is not batch:
            self.drop(run.slot)
        elif begun is not None:
            return
        if batch is None or self._refused.get(run.slot) is batch:
            return
        try:
            if self._requests.copy_at(run, step) is not None:
                return
            opened = self._learner.open_step(run.slot, batch)
        except (InvalidBatch, CopyRefused) as error:  # the commit may be of another batch
            logger.debug("run %s: step %d does not begin before its commit: %s", run.run_id, step, error)
            self._refused[run.slot] = batch
            return
        self._begun[run.slot] = _Begun(batch, time.monotonic())
        self._shares.add(run.slot, run.config.training.weight, {each: opened.length(each) for each in opened.samples})

    def takes(self, run: Run, batch: Batch) -> bool:
        """Returns whether the step of this committed batch has begun; drops any other that has."""
        begun = self._begun.get(run.slot)
        if begun is None:
            return False
        if begun.batch is not batch:
            self.drop(run.slot)
            return False
        run.waited = begun.at - run.idle_since
        del self._begun[run.slot]
        return True

    def drop(self, slot: int) -> None:
        """Drops what has begun in a slot, if anything has."""
        self._refused.pop(slot, None)
        if self._begun.pop(slot, None) is not None:
            self._shares.remove(slot)
            self._learner.drop_step(slot)
