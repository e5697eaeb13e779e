"""Which layers of a model can have an adapter, by computation when it is loaded, and which of them a run's configuration names.

A linear layer can if the model calls it with all tokens of a row and goes on with nothing but its product. A router that is a
subclass of `nn.Linear` returns a choice of experts; a head gets only the predicting tokens; a state space may multiply by a
weight without calling its layer, so that an adapter would change nothing. `prove_layers` finds them out;
`counterpoint/trainer/lora/multi_lora.py` wraps the others.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.peft_names import expert_names
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.model.adapters.factor_stacks import ALIGNMENT
from counterpoint.trainer.model.experts import are_known_experts
from counterpoint.trainer.model.load import log_probabilities
from counterpoint.trainer.model.text_part import text_config

logger = logging.getLogger(__name__)

_TOKENS = 11
"""The tokens of the row that is computed; one of them predicts. No layer may have this size instead of it."""

_EXPERTS_UNKNOWN_TO_PEFT = ("qwen3_5_moe",)
"""Kinds whose experts PEFT would load without their adapters, with a warning, though it knows them in the part for text alone."""

_NOT_CALLED = "the model computes a text without calling it"


def prove_layers(model: nn.Module) -> None:
    """Runs a model from `load_model` once, and stores on it which linear layers cannot have an adapter, and why.

    Every rank of a divided model calls it.
    """
    candidates = {name: module for name, module in model.named_modules() if _may_be_linear(model, module)}
    reasons: dict[str, str | None] = {}

    def observe(name: str, module: nn.Linear, inputs: tuple[Any, ...], output: Any) -> None:
        reasons[name] = reasons.get(name) or _fault(module, inputs, output)

    device = next(model.parameters()).device
    positions_T = torch.arange(_TOKENS, device=device)
    tokens_T = positions_T % text_config(model).vocab_size
    with ExitStack() as stack, torch.no_grad():
        for name, module in candidates.items():
            hook: Callable[..., Any] = partial(observe, name)
            stack.callback(module.register_forward_hook(hook).remove)
        log_probabilities(model, tokens_T, positions_T, [_TOKENS], positions_T[-2:-1], tokens_T[-1:], 1.0)
    alike = {_pattern(name): reason for name, reason in reasons.items()}
    # Of experts that are layers of their own, no token may have chosen some; they are as the others.
    found = {name: reasons.get(name, alike.get(_pattern(name), _NOT_CALLED)) for name in candidates}
    for name, module in model.named_modules():
        if are_known_experts(module) and model.config.model_type in _EXPERTS_UNKNOWN_TO_PEFT:
            found[name] = f"PEFT 0.21 does not find the experts of a {model.config.model_type} in an adapter's files"
        elif are_known_experts(module) and expert_names(model, name, len(module.gate_up_proj)) is None:
            found[name] = (
                "its checkpoint has all experts of a layer in one weight, and an adapter's files have no name for each"
            )
    model.without_adapters = {name: reason for name, reason in found.items() if reason is not None}


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers that have or can have adapters, by module path, in the model's order.

    The output layer has none, since it gets only the predicting tokens of a row.
    """
    refused = getattr(model, "without_adapters", {})
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = name.rpartition(".")[0] in found
        if inside or name in refused:
            continue
        if isinstance(module, MultiLora) or _may_be_linear(model, module) or are_known_experts(module):
            found[name] = module
    return found


def is_target(name: str, config: LoraConfig) -> bool:
    """Returns whether a run with this configuration has an adapter on the layer at module path `name`, if it can have one."""
    return name.rpartition(".")[2] in config.target_modules


def check_targets(model: nn.Module, config: LoraConfig, max_rank: int) -> None:
    """Raises `ValueError` unless the model, wrapped or not, can have this adapter."""
    if config.rank > max_rank:
        raise ValueError(
            f"training.lora.rank = {config.rank}: this trainer takes ranks up to max_lora_rank = {max_rank}"
        )
    known = {name.rpartition(".")[2] for name in adaptable(model)}
    missing = [name for name in config.target_modules if name not in known]
    reasons = {name: reason for name in missing if (reason := _why_not(model, name))}
    if reasons:
        raise ValueError(
            f"training.lora.target_modules = {config.target_modules}: "
            + "; ".join(f"{name!r} cannot have an adapter: {reason}" for name, reason in reasons.items())
            + f"; remove what cannot; this model's layers that can have one are {sorted(known)}"
        )
    if len(missing) == len(config.target_modules):
        raise ValueError(
            f"training.lora.target_modules = {config.target_modules}: this model has no such layer that can have an adapter; "
            f"it has {sorted(known)}"
        )
    if missing:
        logger.warning("LoRA: this model has no layer named %s that can have an adapter", sorted(missing))
    without = [name for name in getattr(model, "without_adapters", {}) if is_target(name, config)]
    if without:
        logger.warning(
            "LoRA: %d layers of these names cannot have an adapter and get none, such as %s: %s",
            len(without), without[0], model.without_adapters[without[0]],
        )  # fmt: skip


def _may_be_linear(model: nn.Module, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module is not model.get_output_embeddings()


def _fault(module: nn.Linear, inputs: tuple[Any, ...], output: Any) -> str | None:
    """Returns why a layer that got and returned these cannot have an adapter; None if it can."""
    kind = type(module).__name__
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
        return f"it is a {kind}, which returns something else than its product"
    if output.shape != (*inputs[0].shape[:-1], module.out_features):
        return f"it is a {kind} whose result has the shape {list(output.shape)} for an input {list(inputs[0].shape)}"
    if inputs[0].numel() != _TOKENS * inputs[0].shape[-1]:
        return "it does not get all tokens of a row, each once"
    return None


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+", ".*", name)


def _why_not(model: nn.Module, target: str) -> str | None:
    """Returns why layers of this name cannot have an adapter; None if there is no such layer."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == target:
            return f"{name}: {getattr(model, 'without_adapters', {}).get(name) or _of_another_kind(model, module)}"
    return None


def _of_another_kind(model: nn.Module, module: nn.Module) -> str:
    if module is model.get_output_embeddings():
        return "it is the output layer, which gets only the predicting tokens of a row"
    if hasattr(module, "_apply_gate"):
        return (
            f"it is a {type(module).__name__}; expected experts with a gate, without biases, of weights [experts, out, in] "
            f"with sizes in multiples of {ALIGNMENT}, as in Qwen3-MoE"
        )
    return f"it is a {type(module).__name__}; expected an nn.Linear, or experts as in Qwen3-MoE"
