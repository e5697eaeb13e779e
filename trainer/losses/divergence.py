"""Estimates of the KL divergence to another policy from sampled tokens (Schulman, "Approximating KL Divergence", 2020)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from trainer.losses.ratios import LARGEST_LOG_RATIO


def divergence(
    trainer_log_probabilities_P: Tensor, reference_log_probabilities_P: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Returns an estimate of KL(trained || reference) for each token, `[P]`, with gradient; tokens are of the trained policy.

    With d = log p_reference - log p: k1 = -d is unbiased and may be negative, k2 = d^2 / 2 is biased and its gradient is that
    of the divergence, k3 = exp(d) - 1 - d is unbiased and not negative. In k3, d is cut at `LARGEST_LOG_RATIO`, without a
    gradient beyond.
    """
    d_P = reference_log_probabilities_P - trainer_log_probabilities_P
    if estimator == "k1":
        return -d_P
    if estimator == "k2":
        return d_P.square() / 2
    d_P = d_P.clamp(max=LARGEST_LOG_RATIO)
    return d_P.exp() - 1 - d_P
