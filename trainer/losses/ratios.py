"""Probability ratios of a token or of its whole sample, and the correction for an inference engine that computes others.

A sample's ratio is the product of those of its trained tokens, or their geometric mean; each of its tokens then has that one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from run.loss import LossConfig, RatioLevel
from trainer.losses.contract import LossInputs

LARGEST_LOG_RATIO = 20.0
"""A larger one is cut to this, without a gradient: the product of a long sample's ratios would be infinite."""


def ratio(log_ratio_P: Tensor, level: RatioLevel, inputs: LossInputs) -> Tensor:
    """Returns the ratio `[P]` of each token at a level, from the logarithms of the tokens' own."""
    if level != "token":
        log_ratio_P = _of_samples(log_ratio_P, inputs, mean=level == "sequence_mean")
    return log_ratio_P.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _of_samples(values_P: Tensor, inputs: LossInputs, *, mean: bool) -> Tensor:
    """Returns, for each token, the sum or the mean of its sample's values, `[P]`."""
    sums_S = values_P.new_zeros(inputs.samples).index_add(0, inputs.sample_P, values_P)
    if mean:
        sums_S = sums_S / torch.bincount(inputs.sample_P, minlength=inputs.samples)
    return sums_S[inputs.sample_P]


@torch.no_grad()
def correction(inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Returns the weight `[P]` of each token that corrects for the inference engine, and which tokens it masks.

    With c the ratio of the weights before the step to the engine, at `correction_level`: clip(c, low, high), truncated importance
    sampling (TIS: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025), or c within
    [low, high] and 0 outside, masked importance sampling (MIS: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse
    from the Training-Inference Mismatch", 2025; of tokens, IcePop: Ling Team, "Every Step Evolves", 2025).
    """
    assert config.correction_level is not None
    c_P = ratio(old(inputs) - inputs.inference_log_probabilities_P, config.correction_level, inputs)
    if config.correction == "truncate":
        return c_P.clamp(config.correction_low, config.correction_high), torch.zeros_like(c_P, dtype=torch.bool)
    masked_P = outside(c_P, config.correction_low, config.correction_high)
    return c_P.masked_fill(masked_P, 0.0), masked_P


def old(inputs: LossInputs) -> Tensor:
    """Returns the log-probabilities under the weights before the step, `[P]`, without a gradient."""
    if inputs.old_log_probabilities_P is None:
        return inputs.trainer_log_probabilities_P.detach()
    return inputs.old_log_probabilities_P


def outside(values_P: Tensor, low: float | None, high: float | None) -> Tensor:
    """Returns which values are below `low` or above `high`, bool `[P]`; None is no limit."""
    outside_P = torch.zeros_like(values_P, dtype=torch.bool)
    if low is not None:
        outside_P = outside_P | (values_P < low)
    if high is not None:
        outside_P = outside_P | (values_P > high)
    return outside_P
