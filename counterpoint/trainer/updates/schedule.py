"""The values of a run's updates by its configuration: the learning rate's warm-up and decay, and what stays the same."""

from __future__ import annotations

import math

from counterpoint.run.items import AdamW, Sgd, UpdateValues
from counterpoint.run.trained import TrainingConfig


def learning_rate(config: TrainingConfig, steps: float, position: int, peak: float | None = None) -> float:
    """Returns the rate of update `position` of `steps`, from 1: linear warm-up, then constant or decaying to zero.

    A rate that decays is zero after the last update. `peak` is used instead of the configured rate, if given.
    """
    peak = config.learning_rate if peak is None else peak
    if position <= config.warmup_steps:
        return peak * position / config.warmup_steps
    if config.lr_schedule == "constant":
        return peak
    progress = min((position - 1 - config.warmup_steps) / max(steps - config.warmup_steps, 1), 1.0)
    remaining = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * remaining


def scheduled(config: TrainingConfig, steps: float, position: int, peak: float | None = None) -> UpdateValues:
    """Returns the values of update `position` of `steps`, with the rate of `learning_rate`."""
    rate = learning_rate(config, steps, position, peak)
    if config.optimizer == "sgd":
        return Sgd(rate, config.momentum, config.weight_decay, config.max_grad_norm)
    return AdamW(rate, config.betas, decay=config.weight_decay, clip=config.max_grad_norm)
