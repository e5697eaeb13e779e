"""The policy-gradient loss, per token, and the contract of a custom one.

Built in: the ratio r = p_trainer / p_inference of each trained token corrects for the policy that sampled it being older, or of
other precision, than the one trained. Per token the loss is -stop_gradient(min(r, ratio_clip)) * advantage * log p_trainer:
a truncated importance weight on REINFORCE that, unlike PPO's clipping, keeps the gradient of every token it weighs (CISPO:
MiniMax, "MiniMax-M1", 2025; truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training", 2025). Tokens whose ratio is outside [ratio_low, ratio_high] carry no gradient at all, since at such
a distance the correction is noise (IcePop: Ling Team, "Every Step Evolves", 2025).

A step's loss is the sum over its tokens divided by the number of trained tokens of the whole step, masked ones included, so
that it depends neither on how the step was packed nor on how many ranks trained it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from environments.import_path import import_advice
from orchestrator.config import LossConfig


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of one micro-batch, all float32 `[P]`."""

    trainer_log_probabilities_P: Tensor
    """With gradient."""
    inference_log_probabilities_P: Tensor
    advantages_P: Tensor


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """What a loss returns."""

    loss_P: Tensor
    """float32 `[P]`, not normalised; its sum is differentiated."""
    masked_P: Tensor
    """bool `[P]`: trained tokens that the loss leaves out. For the metrics."""


Loss = Callable[[LossInputs], LossOutputs]


def importance_ratio(inputs: LossInputs, *, ratio_low: float, ratio_high: float, ratio_clip: float) -> LossOutputs:
    """The built-in loss; see the top of this file."""
    with torch.no_grad():
        ratio_P = (inputs.trainer_log_probabilities_P - inputs.inference_log_probabilities_P).exp()
        masked_P = (ratio_P < ratio_low) | (ratio_P > ratio_high)
        weight_P = ratio_P.clamp(max=ratio_clip).masked_fill(masked_P, 0.0) * inputs.advantages_P
    return LossOutputs(loss_P=-weight_P * inputs.trainer_log_probabilities_P, masked_P=masked_P)


def load_loss(config: LossConfig) -> Loss:
    """The loss that a run's configuration names. A custom one, `module:function`, is called with `LossInputs` and the
    configuration's `args` as keywords, and returns `LossOutputs`.

    Raises:
        ValueError: there is no such loss, or it does not take these arguments.
    """
    if config.kind == "importance_ratio":
        return partial(
            importance_ratio,
            ratio_low=config.ratio_low,
            ratio_high=config.ratio_high,
            ratio_clip=config.ratio_clip,
        )
    module_name, separator, function_name = config.kind.partition(":")
    if not separator:
        raise ValueError(
            f'training.loss.kind = {config.kind!r}: expected "importance_ratio" or an import path "module:function"'
        )
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
        signature = inspect.signature(function)
    except (Exception, SystemExit) as error:  # an operator's module may fail in any way while it is imported
        raise ValueError(
            f"training.loss.kind = {config.kind!r} cannot be used: {type(error).__name__}: {error}"
            f"{import_advice(module_name, error)}"
        ) from error
    try:
        signature.bind(None, **config.args)
    except TypeError as error:
        raise ValueError(f"training.loss.args = {config.args}: {error}; {config.kind} takes {signature}") from error
    return partial(function, **config.args)
