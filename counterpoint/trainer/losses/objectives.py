"""The built-in losses: an objective of ratio r and advantage A, corrected, with penalties; and that of on-policy distillation.

`counterpoint/run/loss.py`:`KINDS` has the kinds: which objective each maximises, its keys' defaults, and its source. In the
formulas r is the ratio of the trained policy's probability to that of the policy that sampled the token (`ratio_to`), of a token
or of its whole sample (`ratio_level`), log p the token's log-probability, sg stop-gradient.

`divisor` and `token_weights` normalise the step's sum over tokens. The divisor is known from the batch before any of it is
trained, and a sample is never split over rows. So a step's loss and its gradient depend neither on how its samples are packed
into rows, nor on how many ranks train them.

- `token`: the mean over tokens (DAPO, arXiv:2503.14476; of a step, not of a row or a rank).
- `sequence`: the mean over samples of the mean over their tokens (GRPO, arXiv:2402.03300).
- `sample`: the mean over samples of the sum over their tokens over a constant (Dr. GRPO, arXiv:2503.20783).

Next in the reading order of `docs/architecture.md`: `counterpoint/trainer/broadcast.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from counterpoint.run.loss import KINDS, LossConfig, Objective, RatioLevel
from counterpoint.trainer.losses.contract import LossInputs, LossOutputs
from counterpoint.trainer.model.without_waiting import counts_of

RATIO_MASK = "ratio_mask"
"""The given column that chooses the tokens of a sample's mean ratio."""

LARGEST_LOG_RATIO = 20.0
"""A larger one is cut to this, without a gradient: the product of a long sample's ratios would be infinite."""


def policy_gradient(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Computes -c J(r, A) + kl_coefficient KL - entropy_coefficient H for each token.

    r is the ratio of the trained policy to `ratio_to` at `ratio_level`; c the correction for the inference engine, or 1; KL the
    divergence to the reference; H the entropy of the token's distribution.
    """
    log_probabilities_P = inputs.trainer_log_probabilities_P
    before_P = old(inputs) if config.ratio_to == "old" else inputs.inference_log_probabilities_P
    if log_probabilities_P.ndim > before_P.ndim:  # of several targets: only a likelihood is computed, without a ratio
        before_P = before_P[:, None]
    ratio_P = ratio(log_probabilities_P - before_P, config.ratio_level or "token", inputs)
    objective_P, masked_P = OBJECTIVES[KINDS[config.kind].objective](ratio_P, inputs, config)
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


def distillation(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Computes the loss of on-policy distillation: the policy learns from its samples what a teacher thinks of each token.

    It is the per-token reverse KL divergence KL(policy || teacher), estimated from the sampled tokens (Agarwal et al., "On-Policy
    Distillation of Language Models" (GKD), 2023; Thinking Machines, "On-Policy Distillation", 2025). The task's reward may be
    mixed in. With p_sampled the probability that the inference engine sampled the token with,

        A = log p_teacher - log p_sampled + reward_coefficient * advantage

    and the rest is that of `importance_ratio`. A is that of the token itself alone: no sum over the tokens that follow (a
    discount factor of 0). With r = 1 the expected gradient is that of the divergence at each token, given the tokens before it.
    The metric `reverse_kl` is its estimate from the step's samples, in nats a token. Raises `ValueError` without the teacher's
    log-probabilities.
    """
    if inputs.teacher_log_probabilities_P is None:
        raise ValueError("the batch has no teacher_log_probabilities; its orchestrator has no [teacher]")
    reverse_kl_P = inputs.inference_log_probabilities_P - inputs.teacher_log_probabilities_P
    advantages_P = (config.reward_coefficient or 0.0) * inputs.advantages_P - reverse_kl_P
    outputs = policy_gradient(replace(inputs, advantages_P=advantages_P), config)
    return replace(outputs, metrics_P={"reverse_kl": reverse_kl_P})


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
    """sg(clip(r, ratio_clip_low, ratio_clip)) A log p, and 0 where r is outside [ratio_low, ratio_high]; sg: stop-gradient."""
    ratio_P = ratio_P.detach()
    masked_P = outside(ratio_P, config.ratio_low, config.ratio_high)
    weight_P = ratio_P.clamp(config.ratio_clip_low, config.ratio_clip).masked_fill(masked_P, 0.0) * inputs.advantages_P
    return weight_P * inputs.trainer_log_probabilities_P, masked_P


def softened(ratio_P: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """(4 / t) sigmoid(t (r - 1)) A, with t = `soft_positive` where A > 0 and `soft_negative` elsewhere."""
    positive_P = inputs.advantages_P > 0
    assert config.soft_positive is not None
    assert config.soft_negative is not None
    temperature_P = torch.where(positive_P, config.soft_positive, config.soft_negative).to(ratio_P.dtype)
    gate_P = torch.sigmoid(temperature_P * (ratio_P - 1)) * 4 / temperature_P
    return gate_P * inputs.advantages_P, torch.zeros_like(positive_P)


def proximal(ratio_P: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """A log p - proximity / 2 (log r)^2."""
    assert config.proximity is not None
    penalty_P = config.proximity / 2 * ratio_P.log().square()
    objective_P = inputs.advantages_P * inputs.trainer_log_probabilities_P - penalty_P
    return objective_P, torch.zeros_like(objective_P, dtype=torch.bool)


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


OBJECTIVES: Mapping[Objective, Callable[[Tensor, LossInputs, LossConfig], tuple[Tensor, Tensor]]] = {
    "clipped": clipped,
    "truncated": truncated,
    "softened": softened,
    "proximal": proximal,
    "plain": plain,
    "likelihood": likelihood,
}
"""Each takes the ratio `[P]`; returns what is maximised, `[P]`, with gradient, and which tokens have no gradient, bool `[P]`,
because their ratio is too far from 1."""


def ratio(log_ratio_P: Tensor, level: RatioLevel, inputs: LossInputs) -> Tensor:
    """Returns the ratio `[P]` of each token at a level, from the logarithms of the tokens' own.

    "sequence_mean_token" is GSPO-token's: the geometric mean without a gradient, times the token's own ratio over itself (Zheng
    et al., arXiv:2507.18071, section 4.3). With `inputs.given[RATIO_MASK]` the mean is that of the tokens where this is not 0.
    """
    if level == "sequence_mean_token":
        own_P = log_ratio_P.detach()
        log_ratio_P = _of_samples(own_P, inputs, mean=True, mask_P=inputs.given.get(RATIO_MASK)) + (log_ratio_P - own_P)
    elif level != "token":
        log_ratio_P = _of_samples(log_ratio_P, inputs, mean=level == "sequence_mean")
    return log_ratio_P.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _of_samples(values_P: Tensor, inputs: LossInputs, *, mean: bool, mask_P: Tensor | None = None) -> Tensor:
    """Returns, for each token, the sum or the mean of its sample's values, `[P]`; with a mask, of those where it is not 0."""
    zeros_S = values_P.new_zeros(inputs.samples)
    if mask_P is not None:
        values_P = values_P.where(mask_P != 0, 0.0)
    sums_S = zeros_S.index_add(0, inputs.sample_P, values_P)
    if mean and mask_P is not None:
        counts_S = zeros_S.index_add(0, inputs.sample_P, (mask_P != 0).to(zeros_S.dtype))
        sums_S = sums_S / counts_S.clamp(min=1)
    elif mean:
        sums_S = sums_S / counts_of(inputs.sample_P, inputs.samples)
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


def divergence(
    trainer_log_probabilities_P: Tensor, reference_log_probabilities_P: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Returns an estimate of KL(trained || reference) for each token, `[P]`, with gradient; tokens are of the trained policy.

    Source: Schulman, "Approximating KL Divergence", 2020.
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
    counts_S = counts_of(inputs.sample_P, inputs.samples)
    return (1 / counts_S.to(inputs.advantages_P.dtype))[inputs.sample_P]
