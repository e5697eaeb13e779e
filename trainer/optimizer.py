"""One run's optimizer: AdamW or SGD in float32, its learning-rate schedule, and gradient clipping.

Source of AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. Parameters of lower precision have a
float32 master copy, and their gradients accumulate in float32: in bfloat16 an update by a thousandth of a weight rounds to zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from run.config import TrainingConfig


def learning_rate(config: TrainingConfig, steps: int, step: int, peak: float | None = None) -> float:
    """Returns the rate of update `step` of `steps`, from 1: linear warm-up, then constant, or decaying to zero after the last.

    `peak` is used instead of the configured rate, if given.
    """
    peak = config.learning_rate if peak is None else peak
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return peak
    progress = min((step - 1 - config.warmup_steps) / max(steps - config.warmup_steps, 1), 1.0)
    remaining = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * remaining


STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "sgd": ("momentum_buffer",)}
"""The state that each kind of optimizer has for a parameter."""


class Optimizer:
    """Owns the gradients of a run's parameters: backward passes accumulate into it until `step` or `zero_grad`."""

    def __init__(self, parameters: dict[str, nn.Parameter], config: TrainingConfig, steps: int) -> None:
        """Optimizes `parameters`, by name, in `steps` updates. Weight decay applies to matrices only, not to norms and biases."""
        self.config = config
        self.peak_rate = config.learning_rate
        """May be changed between updates."""
        self.steps = steps
        self.parameters = parameters
        self.masters: dict[str, Tensor] = {name: self._master(parameter) for name, parameter in parameters.items()}
        matrices = [master for master in self.masters.values() if master.ndim >= 2]
        vectors = [master for master in self.masters.values() if master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = _make(config, [group for group in groups if group["params"]])

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        master = parameter.detach().float().requires_grad_()

        def move_gradient(accumulated: nn.Parameter) -> None:
            assert accumulated.grad is not None
            gradient = accumulated.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            accumulated.grad = None

        parameter.register_post_accumulate_grad_hook(move_gradient)
        return master

    def gradients(self) -> list[Tensor]:
        """Returns the accumulated gradients in the order of the parameters, float32; zeros where a parameter had no part."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def gradient_norm(self) -> Tensor:
        """Returns the global 2-norm of the gradients, a float32 scalar."""
        return torch.nn.utils.get_total_norm(self.gradients())

    def step(self, step: int, norm: Tensor) -> float:
        """Clips the gradients, whose norm is `norm`, and applies the update at position `step` of the schedule.

        Returns the learning rate.
        """
        torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.config.max_grad_norm, norm)
        rate = learning_rate(self.config, self.steps, step, self.peak_rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.zero_grad()
        self._publish_masters()
        return rate

    def zero_grad(self) -> None:
        """Drops the accumulated gradients."""
        for tensor in (*self.masters.values(), *self.parameters.values()):
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """Returns all state as tensors: `master.<name>`, and after the first step `<key>.<name>` for each of `STATE_KEYS`."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            tensors[f"master.{name}"] = master.detach()
            for key, value in self._optimizer.state.get(master, {}).items():
                if value is not None:  # SGD without momentum has None here
                    tensors[f"{key}.{name}"] = value
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restores what `state` returned, and sets the parameters from it.

        Raises:
            ValueError: a tensor is missing or of another shape: the state is of another model, adapter or optimizer.
        """
        for name, master in self.masters.items():
            saved = tensors.get(f"master.{name}")
            if saved is None or saved.shape != master.shape:
                found = "is missing" if saved is None else f"has shape {list(saved.shape)}"
                raise ValueError(f"weight {name} {found}; this model has {list(master.shape)}")
            with torch.no_grad():
                master.copy_(saved)
            state = {
                key: tensors[f"{key}.{name}"] for key in STATE_KEYS[self.config.optimizer] if f"{key}.{name}" in tensors
            }
            other = [
                key for keys in STATE_KEYS.values() for key in keys if f"{key}.{name}" in tensors and key not in state
            ]
            if other:
                raise ValueError(
                    f"it holds {other[0]}, which training.optimizer = {self.config.optimizer!r} does not have"
                )
            self._optimizer.state.pop(master, None)
            if state:
                self._optimizer.state[master] = {key: value.to(master.device) for key, value in state.items()}
        self._publish_masters()

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])


def _make(config: TrainingConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
