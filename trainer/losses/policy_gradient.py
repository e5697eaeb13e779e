"""The whole loss of every built-in kind: an objective of ratio and advantage, corrected, with penalties.

The kinds of `trainer/losses/registry.py` differ in the objective and in their keys' defaults (`run/loss.py`:`KINDS`). What the
sum over tokens is divided by is in `trainer/losses/normalisation.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from run.loss import LossConfig
from trainer.losses.contract import LossInputs, LossOutputs
from trainer.losses.divergence import divergence
from trainer.losses.ratios import correction, old, ratio

Objective = Callable[[Tensor, LossInputs, LossConfig], tuple[Tensor, Tensor]]
"""From the ratio `[P]` to what is maximised, `[P]`, and which tokens have no gradient, bool `[P]` (`objectives.py`)."""


def policy_gradient(inputs: LossInputs, config: LossConfig, objective: Objective) -> LossOutputs:
    """Computes -c J(r, A) + kl_coefficient KL - entropy_coefficient H for each token.

    r is the ratio of the trained policy to `ratio_to` at `ratio_level`; c the correction for the inference engine, or 1; KL the
    divergence to the reference; H the entropy of the token's distribution.
    """
    log_probabilities_P = inputs.trainer_log_probabilities_P
    before_P = old(inputs) if config.ratio_to == "old" else inputs.inference_log_probabilities_P
    ratio_P = ratio(log_probabilities_P - before_P, config.ratio_level or "token", inputs)
    objective_P, masked_P = objective(ratio_P, inputs, config)
    loss_P = -objective_P
    if config.correction in ("truncate", "mask"):
        weight_P, left_out_P = correction(inputs, config)
        loss_P, masked_P = loss_P * weight_P, masked_P | left_out_P
    if config.kl_coefficient and config.kl_estimator:
        if inputs.reference_log_probabilities_P is None:
            raise ValueError("kl_coefficient is above 0, and the run has no reference policy; add [training.reference]")
        kl_P = divergence(log_probabilities_P, inputs.reference_log_probabilities_P, config.kl_estimator)
        loss_P = loss_P + config.kl_coefficient * (kl_P * ratio_P if config.kl_weighted else kl_P)
    if config.entropy_coefficient:
        loss_P = loss_P - config.entropy_coefficient * inputs.entropies_P
    return LossOutputs(loss_P, masked_P)
