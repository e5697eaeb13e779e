"""Computes the log-probabilities of a recorded batch again, with the weights that a run has now, in its precision or in float32.

The forward pass is that of training, in the rows of training, with recorded routing and temperatures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import nn

from counterpoint.run.items import Objective
from counterpoint.trainer.again.learner import RunAgain
from counterpoint.trainer.again.outliers import Values
from counterpoint.trainer.packer import pack
from counterpoint.trainer.updates.columns import trained_positions
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.trainer.work.step import forward
from counterpoint.transport.records import Batch


@torch.no_grad()
def computed(again: RunAgain, batch: Batch, only: Collection[int] | None = None) -> Values:
    """Returns the log-probability of each trained token, float64 `[P]`, in the order of the batch.

    With `only`, of these samples; not a number for the others. Raises `InvalidBatch`.
    """
    loaded, values_T = again.learner.loaded, np.full(len(batch.token_ids_T), np.nan)
    for step in _updates(again, batch):
        for row in again.rows(step):
            samples = [each for _, own in row for each in own if only is None or each in only]
            if samples:
                micro = pack([(batch, samples)], loaded.limits, again.learner.ranks.device)
                values_P, _, _ = forward(loaded.model, loaded.replay, [step], micro)
                values_T[trained_positions(batch, samples).numpy()] = values_P.double().cpu().numpy()
    return values_T[batch.loss_mask_T != 0]


def _updates(again: RunAgain, batch: Batch) -> Iterator[Contribution]:
    """Yields a contribution at each pass that trains its samples for the first time: their rows are those of training."""
    step = Contribution(again.run, batch, again.learner.ranks.device, objective=Objective(forward_only=True))
    while True:
        if not step.current.measures and step.current.first_epoch:
            yield step
        if step.is_last_pass:
            return
        step.begin_next_pass()


@contextmanager
def in_float32(model: nn.Module) -> Iterator[bool]:
    """Has the model compute in float32 during the block, with the same weights; yields whether it does not do so anyway."""
    tensors = {id(each): each for each in chain(model.parameters(), model.buffers())}.values()
    changed = [(each, each.dtype) for each in tensors if each.dtype in (torch.bfloat16, torch.float16)]
    for each, _ in changed:
        each.data = each.data.float()
    try:
        yield bool(changed)
    finally:
        for each, dtype in changed:
            each.data = each.data.to(dtype)
