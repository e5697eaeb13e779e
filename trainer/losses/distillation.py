"""On-policy distillation: the policy learns from its own samples what a teacher thinks of each of their tokens.

The loss is the per-token reverse KL divergence KL(policy || teacher), estimated from the sampled tokens (Agarwal et al.,
"On-Policy Distillation of Language Models" (GKD), 2023; Thinking Machines, "On-Policy Distillation", 2025). The advantage of a
token is -(log p_sampled - log p_teacher), where p_sampled is the probability that the inference engine sampled it with, and only
that of the token itself: no sum over the tokens that follow (a discount factor of 0). The task's reward may be mixed in:

    A = log p_teacher - log p_sampled + reward_coefficient * advantage
    loss = -stop_gradient(min(r, ratio_clip) * A) * log p_trainer,  r = p_trainer / p_sampled,  0 outside [ratio_low, ratio_high]

which is `importance_ratio` of `trainer/losses/registry.py` with this advantage. With r = 1 the expected gradient is that of the
divergence at each token, given the tokens before it. The metric `reverse_kl` is its estimate from the step's samples, in nats a
token.
"""

from __future__ import annotations

from dataclasses import replace

from run.loss import LossConfig
from trainer.losses.contract import LossInputs, LossOutputs
from trainer.losses.objectives import truncated
from trainer.losses.policy_gradient import policy_gradient


def distillation(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Computes the loss of on-policy distillation; its formula and sources are at the top of this file.

    Raises `ValueError` without the teacher's log-probabilities.
    """
    if inputs.teacher_log_probabilities_P is None:
        raise ValueError("the batch has no teacher_log_probabilities; its orchestrator has no [teacher]")
    reverse_kl_P = inputs.inference_log_probabilities_P - inputs.teacher_log_probabilities_P
    advantages_P = (config.reward_coefficient or 0.0) * inputs.advantages_P - reverse_kl_P
    outputs = policy_gradient(replace(inputs, advantages_P=advantages_P), config, truncated)
    return replace(outputs, metrics_P={"reverse_kl": reverse_kl_P})
