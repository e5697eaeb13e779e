"""A value head: a linear function of the last hidden state, with parameters of its own, and its clipped loss.

Source: Schulman et al., "Proximal Policy Optimization Algorithms", 2017, with the clipped value loss of its authors'
implementation (`baselines/ppo2`). The head reads the state that predicts a token, so its estimate does not know the token. It
begins with zeros: every estimate is 0, and the first advantages are those of the rewards. Its gradient goes on into the weights
of the run, as the policy's does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.run.updates import ValueHeadConfig

PREFIX = "value_head."
"""The prefix of the names of its parameters among those of the run."""


class ValueHead:
    """The value head of one run."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        """Begins with zeros, in float32."""
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by name, for the optimizer of the run."""
        return {f"{PREFIX}weight": self.weight, f"{PREFIX}bias": self.bias}

    def __call__(self, hidden_PH: Tensor) -> Tensor:
        """Returns the estimates `[P]` of hidden states `[P, H]`, in float32."""
        return functional.linear(hidden_PH.float(), self.weight, self.bias)[:, 0]


def value_loss(values_P: Tensor, old_P: Tensor, returns_P: Tensor, clip: float) -> Tensor:
    """Returns the loss of each estimate, `[P]`: half the larger of two squared errors.

    One is that of the estimate, the other that of the estimate moved to within `clip` of the one before the step.
    """
    clipped_P = old_P + (values_P - old_P).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_P - returns_P).square(), (clipped_P - returns_P).square())


def row_values(heads: Sequence[ValueHead | None], hidden_PH: Tensor | None, lengths: Sequence[int]) -> Tensor | None:
    """Returns the estimates of a row's trained tokens, `[P]`, 0 for runs without a head; None if no run has one.

    Args:
        heads: of the row's runs, in its order.
        hidden_PH: the last hidden states at the predicting positions; None only if no run has a head.
        lengths: trained tokens of each run.
    """
    if not any(heads):
        return None
    assert hidden_PH is not None
    parts = zip(heads, hidden_PH.split(list(lengths)), strict=True)
    return torch.cat([head(own) if head else own.new_zeros(len(own), dtype=torch.float32) for head, own in parts])


def differentiate(
    config: ValueHeadConfig, values_P: Tensor, old_P: Tensor, returns_P: Tensor, divisor: float
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each estimate, and the gradient of their weighted sum over `divisor` by the estimates, `[P]` each."""
    loss_P = value_loss(values_P, old_P, returns_P, config.clip)
    (gradient_P,) = torch.autograd.grad(loss_P.sum() * (config.coefficient / divisor), values_P)
    return loss_P.detach(), gradient_P
