"""The built-in policy-gradient loss, per token, and the contract of a custom loss.

Built in: the ratio r = p_trainer / p_inference of each trained token corrects for a sampling policy that is older, or of another
precision, than the trained one. Per token the loss is -stop_gradient(min(r, ratio_clip)) * advantage * log p_trainer:
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
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from environments.import_path import import_advice
from run.config import LossConfig

TRIED_TOKENS = 8
"""Tokens of the made-up batch with which a custom loss is called when it is loaded."""

_METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of one micro-batch, all float32 `[P]`."""

    trainer_log_probabilities_P: Tensor
    """With gradient."""
    inference_log_probabilities_P: Tensor
    advantages_P: Tensor


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The result of a loss."""

    loss_P: Tensor
    """float32 `[P]`, not normalised; its sum is differentiated."""
    masked_P: Tensor
    """bool `[P]`: trained tokens that the loss leaves out; for the metrics."""
    metrics_P: dict[str, Tensor] = field(default_factory=dict)
    """The loss's own metrics, `[P]` each, without gradient; every call must return the same names. `trainer/metrics.jsonl` has
    their means over the step's trained tokens as `custom_loss/<name>`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A run's loss."""

    function: Callable[[LossInputs], LossOutputs]
    metrics: tuple[str, ...] = ()
    """Names of the metrics that it reports, in order."""

    def __call__(self, inputs: LossInputs, tokens: int = 1) -> tuple[LossOutputs, Tensor]:
        """Returns the outputs, and the gradient `[P]` of their sum over `tokens` by the trainer's log-probabilities.

        Raises what an operator's function raises, and `ValueError` or `TypeError` for invalid outputs.
        """
        log_probabilities_P = inputs.trainer_log_probabilities_P
        outputs = self.function(inputs)
        if not isinstance(outputs, LossOutputs):
            raise TypeError(f"it returned {type(outputs).__name__}; expected LossOutputs")
        named = {"loss_P": outputs.loss_P, "masked_P": outputs.masked_P}
        named |= {f"metrics_P[{name!r}]": value_P for name, value_P in outputs.metrics_P.items()}
        for name, value_P in named.items():
            if value_P.shape != log_probabilities_P.shape:
                raise ValueError(f"{name} has shape {list(value_P.shape)}; expected {list(log_probabilities_P.shape)}")
        if outputs.masked_P.dtype != torch.bool:
            raise ValueError(f"masked_P has dtype {outputs.masked_P.dtype}; expected torch.bool")
        if not outputs.loss_P.requires_grad:
            raise ValueError("loss_P does not depend on trainer_log_probabilities_P; expected a loss with a gradient")
        (gradient_P,) = torch.autograd.grad(outputs.loss_P.sum() / tokens, log_probabilities_P)
        return outputs, gradient_P


def importance_ratio(inputs: LossInputs, *, ratio_low: float, ratio_high: float, ratio_clip: float) -> LossOutputs:
    """Computes the built-in loss; its formula and sources are at the top of this file."""
    with torch.no_grad():
        ratio_P = (inputs.trainer_log_probabilities_P - inputs.inference_log_probabilities_P).exp()
        masked_P = (ratio_P < ratio_low) | (ratio_P > ratio_high)
        weight_P = ratio_P.clamp(max=ratio_clip).masked_fill(masked_P, 0.0) * inputs.advantages_P
    return LossOutputs(loss_P=-weight_P * inputs.trainer_log_probabilities_P, masked_P=masked_P)


def load_loss(config: LossConfig) -> Loss:
    """Loads the loss that a run's configuration names.

    A custom loss, `module:function`, is called with `LossInputs` and the configuration's `args` as keywords, and returns
    `LossOutputs`. It is called once here, with a made-up batch.

    Raises:
        ValueError: there is no such loss, it does not take these arguments, or it fails with the made-up batch.
    """
    if config.kind == "importance_ratio":
        low, high, clip = config.ratio_low, config.ratio_high, config.ratio_clip
        return Loss(partial(importance_ratio, ratio_low=low, ratio_high=high, ratio_clip=clip))
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
    return _tried(partial(function, **config.args), config.kind)


def _tried(function: Callable[[LossInputs], LossOutputs], kind: str) -> Loss:
    """Calls an operator's loss once with `TRIED_TOKENS` made-up tokens. Raises `ValueError` for any error."""
    inference_P = -torch.linspace(0.1, 4.0, TRIED_TOKENS)
    advantages_P = torch.linspace(-1.0, 1.0, TRIED_TOKENS)
    inputs = LossInputs((inference_P - 0.05 * advantages_P).requires_grad_(), inference_P.clone(), advantages_P)
    try:
        outputs, gradient_P = Loss(function)(inputs)
        for name, value_P in (("loss_P", outputs.loss_P), ("the gradient of loss_P", gradient_P)):
            if not bool(value_P.isfinite().all()):
                raise ValueError(f"{name} is not finite: {value_P.tolist()}")
        for name in outputs.metrics_P:
            if not _METRIC_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a metric name; expected letters, digits, '_', '.' and '-', at most 64"
                )
    except (Exception, SystemExit) as error:  # as above
        raise ValueError(
            f"training.loss.kind = {kind!r}, called with a made-up batch: {type(error).__name__}: {error}"
        ) from error
    return Loss(function, tuple(sorted(outputs.metrics_P)))
