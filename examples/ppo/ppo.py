"""The algorithm: generalised advantages, the clipped objective and the value loss, on two small networks.

Sources: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2015), and "Proximal
Policy Optimization Algorithms" (2017). Shapes: T steps, N environments, B = T * N.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
EPOCHS, MINIBATCH, LEARNING_RATE = 4, 256, 1e-3

Array = NDArray[Any]


def network(inputs: int, outputs: int, seed: int) -> nn.Sequential:
    """Returns two hidden layers of 64, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def advantages(rewards: Array, values: Array, next_values: Array, fallen: Array, ended: Array) -> tuple[Array, Array]:
    """Returns advantages and returns, both `[T, N]` float32.

    `next_values` are those of the states after each step; they count unless the pole has fallen. An advantage does not reach
    beyond the end of an episode.
    """
    gains = rewards + GAMMA * next_values * ~fallen - values
    found = np.zeros_like(gains)
    later = np.zeros(gains.shape[1])
    for step in reversed(range(len(gains))):
        later = gains[step] + GAMMA * LAMBDA * ~ended[step] * later
        found[step] = later
    return found.astype(np.float32), (found + values).astype(np.float32)


def improve_policy(policy: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Array], seed: int) -> float:
    """Makes `EPOCHS` passes of the clipped objective over a batch of B rows; returns the mean entropy in nats."""
    observations, actions, old, gain = (
        torch.as_tensor(batch[name].copy()) for name in ("observations", "actions", "log_probabilities", "advantages")
    )
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    entropies = []
    for rows in _minibatches(len(actions), seed):
        distribution = torch.distributions.Categorical(logits=policy(observations[rows]))
        ratio = torch.exp(distribution.log_prob(actions[rows]) - old[rows])
        clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
        entropy = distribution.entropy().mean()
        loss = -torch.min(ratio * gain[rows], clipped * gain[rows]).mean() - ENTROPY * entropy
        _update(policy, optimizer, loss)
        entropies.append(float(entropy.detach()))
    return float(np.mean(entropies))


def improve_values(critic: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Array], seed: int) -> float:
    """Makes `EPOCHS` passes of the squared error over a batch of B rows; returns the mean loss."""
    observations, returns = torch.as_tensor(batch["observations"].copy()), torch.as_tensor(batch["returns"].copy())
    losses = []
    for rows in _minibatches(len(returns), seed):
        loss = ((critic(observations[rows]).squeeze(-1) - returns[rows]) ** 2).mean()
        _update(critic, optimizer, loss)
        losses.append(float(loss.detach()))
    return float(np.mean(losses))


def _minibatches(rows: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [part for _ in range(EPOCHS) for part in torch.randperm(rows, generator=generator).split(MINIBATCH)]


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
