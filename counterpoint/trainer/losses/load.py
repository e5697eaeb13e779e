"""Loads a run's loss: a built-in one by its kind, or an operator's own by its import path.

An operator's own is called once, with a made-up batch, before any rollout is spent.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from counterpoint.environments.import_path import check_allowed, import_advice, import_module
from counterpoint.run.loss import KINDS, LossConfig
from counterpoint.trainer.losses.contract import Loss, LossInputs, LossOutputs
from counterpoint.trainer.losses.objectives import distillation, policy_gradient
from counterpoint.trainer.model.deterministic import advice_on
from counterpoint.transport.configuration.arguments import refuse_booleans

TRIED_TOKENS = 8
"""Tokens of the made-up batch, which are in two samples."""

_METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def load_loss(config: LossConfig, given: Collection[str] = ()) -> Loss:
    """Loads the loss that a run's configuration names.

    A custom loss, `module:function`, is called with `LossInputs` and the configuration's `args` as keywords, and returns
    `LossOutputs`. It is called once here, with a made-up batch, which has the optional inputs that are `given`.

    Raises:
        ValueError: there is no such loss, it does not take these arguments, or it fails with the made-up batch.
    """
    if config.kind not in KINDS:
        return _load_custom(config.kind, config.args, given)
    distils = config.kind == "distillation"
    return Loss(
        partial(distillation if distils else policy_gradient, config=config),
        metrics=("reverse_kl",) if distils else (),
        uses_entropy=bool(config.entropy_coefficient),
    )


def _load_custom(kind: str, args: dict[str, Any], given: Collection[str]) -> Loss:
    """Loads `module:function`, and tries it with `args` and the optional inputs that are `given`."""
    module_name, _, function_name = kind.partition(":")
    check_allowed(kind, "training.loss.kind")
    try:
        function: Callable[..., Any] = getattr(import_module(module_name), function_name)
        signature = inspect.signature(function)
    except BaseException as error:  # an operator's module may fail in any way while it is imported
        raise ValueError(
            f"training.loss.kind = {kind!r} cannot be used: {type(error).__name__}: {error}"
            f"{import_advice(module_name, error)}"
        ) from error
    try:
        signature.bind(None, **args)
    except TypeError as error:
        raise ValueError(f"training.loss.args = {args}: {error}; {kind} takes {signature}") from error
    try:
        refuse_booleans(function, args)
    except ValueError as error:
        raise ValueError(f"training.loss.args.{error}") from None
    return _tried(partial(function, **args), kind, given)


def _tried(function: Callable[[LossInputs], LossOutputs], kind: str, given: Collection[str]) -> Loss:
    """Calls an operator's loss once with `TRIED_TOKENS` made-up tokens. Raises `ValueError` for any error."""
    try:
        outputs, gradients = Loss(function)(_made_up(given))
        for name, value_P in (("loss_P", outputs.loss_P), ("the gradient of loss_P", gradients.log_probabilities_P)):
            if not bool(value_P.isfinite().all()):
                raise ValueError(f"{name} is not finite: {value_P.tolist()}")
        for name in outputs.metrics_P:
            if not _METRIC_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a metric name; expected letters, digits, '_', '.' and '-', at most 64"
                )
    except BaseException as error:  # as above
        raise ValueError(
            f"training.loss.kind = {kind!r}, called with a made-up batch: {type(error).__name__}: {error}"
            f"{_place(error, function)}{advice_on(error)}"
        ) from error
    return Loss(function, tuple(sorted(outputs.metrics_P)), uses_entropy=gradients.entropies_P is not None)


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """Where in the file of an operator's function the error was raised, to append to a message; empty if it was elsewhere."""
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    inside = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if code is not None and frame.f_code.co_filename == code.co_filename
    ]
    return f" (in {inside[-1][0].co_name}, {inside[-1][0].co_filename}:{inside[-1][1]})" if inside else ""


def _made_up(given: Collection[str]) -> LossInputs:
    inference_P = -torch.linspace(0.1, 4.0, TRIED_TOKENS)
    advantages_P = torch.linspace(-1.0, 1.0, TRIED_TOKENS)
    near_P = inference_P - 0.05 * advantages_P
    optional = {name: near_P.clone() for name in given}
    if "values_P" in optional:
        optional["values_P"].requires_grad_()
    return LossInputs(
        near_P.requires_grad_(),
        inference_P.clone(),
        advantages_P,
        sample_P=torch.arange(TRIED_TOKENS) * 2 // TRIED_TOKENS,
        samples=2,
        entropies_P=torch.linspace(0.1, 2.0, TRIED_TOKENS).requires_grad_(),
        **optional,
    )
