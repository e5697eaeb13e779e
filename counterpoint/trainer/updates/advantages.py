"""Advantages from what a step has measured: a penalty for the distance from the reference, and estimation from values (GAE).

Sources: the penalty is that of Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, per token as in
Ouyang et al., "Training language models to follow instructions with human feedback", 2022; GAE is Schulman et al.,
"High-Dimensional Continuous Control Using Generalized Advantage Estimation", 2016, equations 11 and 12.

The tokens of a sample here are its trained ones, in order: what the environment wrote between them is no action, and no time.
All sums are in float64. `T` are the tokens of a whole batch, trained or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.run.updates import ValueHeadConfig

_WHITENED_LEAST = 1e-8
"""Added to a variance before it divides."""


def penalty(coefficient: float, old_T: Tensor, reference_T: Tensor) -> Tensor:
    """Returns `coefficient * (log p_old - log p_reference)` of each token, float64; 0 where both are 0, as on untrained tokens.

    Its mean over tokens that the old policy sampled is the estimator k1 of KL(old || reference).
    """
    return coefficient * (old_T.double() - reference_T.double())


def estimate(
    config: ValueHeadConfig,
    positions: Sequence[Tensor],
    rewards_T: Tensor,
    values_T: Tensor,
    penalty_T: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns of a step's trained tokens.

    A reward is given for a token: a turn's for its last trained one, or the whole sample's for the sample's last. The penalty of
    each token is subtracted from that token's own reward; after a sample's last token the value is 0.

    With a lambda of 1 and a discount of 1, before whitening, advantages are unbiased whatever the values are, since these depend
    on what came before the token alone. A lower lambda trusts the values, and is biased by their errors; a lower discount leaves
    out what comes late; whitening changes the scale, and subtracts a mean that has the token's own advantage in it.

    Args:
        config: discount, lambda, and whether to whiten.
        positions: of each sample, the positions of its trained tokens in the batch, int64, ascending, at least one.
        rewards_T: on any device, 0 where no reward is given.
        values_T: estimates at the positions that predict the tokens.
        penalty_T: None without one.

    Returns:
        `[T]` float64 each, 0 where no token is trained: the advantages, and the returns that the value head learns.
    """
    device = values_T.device
    advantages_T, returns_T = (torch.zeros(len(values_T), dtype=torch.float64, device=device) for _ in range(2))
    received_T = rewards_T.to(device, torch.float64)
    if penalty_T is not None:
        received_T = received_T - penalty_T
    for samples in _of_similar_length([len(each) for each in positions]):
        _estimate(config, [positions[sample] for sample in samples], received_T, values_T, advantages_T, returns_T)
    trained = torch.cat(list(positions)).to(device)
    if config.whiten and len(trained) > 1:
        own = advantages_T[trained]
        advantages_T[trained] = (own - own.mean()) / (own.var() + _WHITENED_LEAST).sqrt()
    return advantages_T, returns_T


def _of_similar_length(lengths: Sequence[int]) -> list[list[int]]:
    """Returns the samples in portions in which the longest has less than twice the tokens of the shortest.

    So padding takes no more memory than the tokens, and fewer tokens are computed one after the other than three times those of
    the longest sample.
    """
    portions: dict[int, list[int]] = {}
    for sample, length in enumerate(lengths):
        portions.setdefault(length.bit_length(), []).append(sample)
    return list(portions.values())


def _estimate(
    config: ValueHeadConfig,
    positions: Sequence[Tensor],
    received_T: Tensor,
    values_T: Tensor,
    advantages_T: Tensor,
    returns_T: Tensor,
) -> None:
    """Fills in the advantages, before whitening, and the returns of some samples."""
    device = values_T.device
    lengths_S = torch.tensor([len(each) for each in positions], device=device)
    longest = int(lengths_S.max())
    # Aligned at their ends, so that one backward recurrence serves all samples; what stands before a sample is never read.
    index_SN = (
        torch.nn.utils.rnn.pad_sequence([each.flip(0) for each in positions], batch_first=True).to(device).flip(1)
    )
    inside_SN = torch.arange(longest, device=device)[None] >= longest - lengths_S[:, None]
    values_SN = values_T.double()[index_SN]
    rewards_SN = received_T[index_SN]
    advantages_SN = torch.zeros_like(values_SN)
    following_S = next_value_S = torch.zeros_like(rewards_SN[:, 0])
    for token in range(longest - 1, -1, -1):
        delta_S = rewards_SN[:, token] + config.discount * next_value_S - values_SN[:, token]
        following_S = delta_S + config.discount * config.gae_lambda * following_S
        advantages_SN[:, token], next_value_S = following_S, values_SN[:, token]
    trained = index_SN[inside_SN]
    advantages_T[trained] = advantages_SN[inside_SN]
    returns_T[trained] = (advantages_SN + values_SN)[inside_SN]
