"""What the policy gradient maximises for a token: the surrogate objectives of the families, of ratio r and advantage A.

Each returns the objective `[P]`, with gradient, and which tokens have none because their ratio is too far from 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from run.loss import LossConfig
from trainer.losses.contract import LossInputs
from trainer.losses.ratios import outside


def clipped(ratio_P: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO's (Schulman et al., arXiv:1707.06347).

    With `clip_dual`, r is at most that in the first term, which bounds it where A < 0 (Ye et al., arXiv:1912.09729).
    """
    assert config.clip_low is not None
    assert config.clip_high is not None
    advantages_P, low, high = inputs.advantages_P, 1 - config.clip_low, 1 + config.clip_high
    bounded_P = ratio_P if config.clip_dual is None else ratio_P.clamp(max=config.clip_dual)
    objective_P = torch.minimum(bounded_P * advantages_P, ratio_P.clamp(low, high) * advantages_P)
    flat_P = ((advantages_P > 0) & (ratio_P > high)) | ((advantages_P < 0) & outside(ratio_P, low, config.clip_dual))
    return objective_P, flat_P


def truncated(ratio_P: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """sg(min(r, ratio_clip)) A log p, and 0 where r is outside [ratio_low, ratio_high]; sg: stop-gradient."""
    ratio_P = ratio_P.detach()
    masked_P = outside(ratio_P, config.ratio_low, config.ratio_high)
    weight_P = ratio_P.clamp(max=config.ratio_clip).masked_fill(masked_P, 0.0) * inputs.advantages_P
    return weight_P * inputs.trainer_log_probabilities_P, masked_P


def softened(ratio_P: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """(4 / t) sigmoid(t (r - 1)) A, with t = `soft_positive` where A > 0 and `soft_negative` elsewhere."""
    positive_P = inputs.advantages_P > 0
    assert config.soft_positive is not None
    assert config.soft_negative is not None
    temperature_P = torch.where(positive_P, config.soft_positive, config.soft_negative).to(ratio_P.dtype)
    gate_P = torch.sigmoid(temperature_P * (ratio_P - 1)) * 4 / temperature_P
    return gate_P * inputs.advantages_P, torch.zeros_like(positive_P)


def plain(ratio_P: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """A log p (Williams, 1992)."""
    del ratio_P, config
    objective_P = inputs.advantages_P * inputs.trainer_log_probabilities_P
    return objective_P, torch.zeros_like(objective_P, dtype=torch.bool)


def likelihood(ratio_P: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The logarithm of p, of tokens that are given and not sampled."""
    del ratio_P, config
    objective_P = inputs.trainer_log_probabilities_P
    return objective_P, torch.zeros_like(objective_P, dtype=torch.bool)
