"""The default loss: a truncated importance weight on REINFORCE, without a clipped gradient.

The ratio r = p_trainer / p_inference of each trained token corrects for a sampling policy that is older, or of another
precision, than the trained one. Per token the loss is -stop_gradient(min(r, ratio_clip)) * advantage * log p_trainer:
a truncated importance weight on REINFORCE that, unlike PPO's clipping, keeps the gradient of every token it weighs (CISPO:
MiniMax, "MiniMax-M1", 2025; truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training", 2025). Tokens whose ratio is outside [ratio_low, ratio_high] carry no gradient at all, since at such
a distance the correction is noise (IcePop: Ling Team, "Every Step Evolves", 2025).
"""

from __future__ import annotations

import torch

from trainer.losses.contract import LossInputs, LossOutputs


def importance_ratio(inputs: LossInputs, *, ratio_low: float, ratio_high: float, ratio_clip: float) -> LossOutputs:
    """Computes the default loss; its formula and sources are at the top of this file."""
    with torch.no_grad():
        ratio_P = (inputs.trainer_log_probabilities_P - inputs.inference_log_probabilities_P).exp()
        masked_P = (ratio_P < ratio_low) | (ratio_P > ratio_high)
        weight_P = ratio_P.clamp(max=ratio_clip).masked_fill(masked_P, 0.0) * inputs.advantages_P
    return LossOutputs(loss_P=-weight_P * inputs.trainer_log_probabilities_P, masked_P=masked_P)
