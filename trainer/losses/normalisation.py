"""What a step's sum over tokens is divided by, and the weight of a token in that sum.

The divisor is known from the batch before any of it is trained, and a sample is never split over rows. So a step's loss and its
gradient depend neither on how its samples are packed into rows, nor on how many ranks train them.

- `token`: the mean over tokens (DAPO, arXiv:2503.14476; of a step, not of a row or a rank).
- `sequence`: the mean over samples of the mean over their tokens (GRPO, arXiv:2402.03300).
- `sample`: the mean over samples of the sum over their tokens over a constant (Dr. GRPO, arXiv:2503.20783).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from run.loss import LossConfig
from trainer.losses.contract import LossInputs


def divisor(config: LossConfig, trained: Collection[int]) -> float:
    """Returns the divisor of samples that are trained together, from the number of trained tokens of each, at least 1."""
    if config.normalisation == "sequence":
        return max(1, len(trained))
    if config.normalisation == "sample":
        if config.normalisation_length is None:
            raise ValueError('training.loss.normalisation = "sample" takes normalisation_length, which is not set')
        return max(1, len(trained)) * config.normalisation_length
    return max(1, sum(trained))


def token_weights(config: LossConfig, inputs: LossInputs) -> Tensor | None:
    """Returns the weight of each token, `[P]`: with `sequence` 1 over its sample's trained tokens; else None, as all are 1."""
    if config.normalisation != "sequence":
        return None
    counts_S = torch.bincount(inputs.sample_P, minlength=inputs.samples)
    return (1 / counts_S.to(inputs.advantages_P.dtype))[inputs.sample_P]
