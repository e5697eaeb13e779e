"""Trains one run's step by a learner in this process, for what measures the trainer without its wire."""

from __future__ import annotations

from trainer.fair_share import FairShare
from trainer.learner import Learner
from trainer.metrics import MetricValue
from trainer.runs.run import OpenStep
from transport.records import Batch


def train_whole_step(learner: Learner, batch: Batch) -> dict[str, MetricValue]:
    """Trains the step of a batch of the run in slot 0, on one rank; returns its metrics."""
    step: OpenStep | None = learner.open_step(0, batch)
    while step is not None:
        shares = FairShare(learner.config.max_tokens, ranks=1)
        shares.add(0, 1.0, {sample: step.length(sample) for sample in step.samples})
        while shares.left(0):
            learner.train_rows(shares.rows())
        step = learner.next_pass(0)
    return learner.finish_step(0)
