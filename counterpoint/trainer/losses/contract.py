"""The contract of a loss: what it gets of a row, what it returns, and what is differentiated.

`counterpoint/trainer/work/step.py` fills `LossInputs` with the trained tokens of one run in one row, and calls the run's `Loss`,
which calls a function of `counterpoint/trainer/losses/objectives.py` or of the operator. What comes back are gradients by the
tensors that the model computed; one backward pass carries them into the weights. So a loss sees `[P]` tensors only, never the
logits or the model, and one that fails concerns its own run.

P stands for the trained tokens of the row. A sample is never split over rows, so whatever a loss computes for a sample, such as
its likelihood under a policy, is computed from all of its trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of one run in one row; `[P]` float32 each, if nothing else is said, and without gradient."""

    trainer_log_probabilities_P: Tensor
    """Log-probabilities under the weights that are trained, with gradient; `[P, K]` where each token has K targets."""
    inference_log_probabilities_P: Tensor
    """Log-probabilities as the inference engine returned them with the tokens."""
    advantages_P: Tensor
    sample_P: Tensor
    """int64: the token's sample, counted within this row from 0, ascending."""
    samples: int
    """Samples of this run in the row. Each has a trained token."""
    entropies_P: Tensor
    """The entropies of the distributions that the tokens were drawn from, under the weights that are trained, in nats. With
    gradient if the loss has used it when it was loaded."""
    old_log_probabilities_P: Tensor | None = None
    """Log-probabilities under the weights before the step. None: a step is one update, so the trainer's own are these."""
    reference_log_probabilities_P: Tensor | None = None
    """Log-probabilities under the reference policy; None without one."""
    teacher_log_probabilities_P: Tensor | None = None
    """Log-probabilities under the teacher; None without one."""
    values_P: Tensor | None = None
    """The value head's estimates at the positions that predict the tokens, with gradient; None without one."""
    given: Mapping[str, Tensor] = field(default_factory=dict)
    """What an objective has given beside the batch, by name: `[P]`, or `[P, K]`, float32 or int64."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The result of a loss."""

    loss_P: Tensor
    """float32, as the log-probabilities, not normalised; its sum is differentiated."""
    masked_P: Tensor
    """bool, as the loss: trained tokens that the loss leaves out; for the metrics."""
    metrics_P: dict[str, Tensor] = field(default_factory=dict)
    """The loss's own metrics, `[P]` each, without gradient; every call must return the same names. `trainer/metrics.jsonl` has
    their means over the step's trained tokens as `custom_loss/<name>`."""


class Gradients(NamedTuple):
    """The gradient of a step's loss by what the model computed for the row, `[P]` each; None where the loss does not use it."""

    log_probabilities_P: Tensor
    entropies_P: Tensor | None = None
    values_P: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A run's loss."""

    function: Callable[[LossInputs], LossOutputs]
    metrics: tuple[str, ...] = ()
    """Names of the metrics that it reports, in order."""
    uses_entropy: bool = False
    """Whether it is differentiated by `entropies_P`."""

    def __call__(
        self, inputs: LossInputs, divisor: float = 1, weights_P: Tensor | None = None
    ) -> tuple[LossOutputs, Gradients]:
        """Returns the outputs, and the gradients by the inputs that have one of their sum, weighted and over `divisor`.

        Raises what an operator's function raises, and `ValueError` or `TypeError` for invalid outputs.
        """
        outputs = self.function(inputs)
        if not isinstance(outputs, LossOutputs):
            raise TypeError(f"it returned {type(outputs).__name__}; expected LossOutputs")
        expected = inputs.trainer_log_probabilities_P.shape
        named = {"loss_P": outputs.loss_P, "masked_P": outputs.masked_P}
        shapes = dict.fromkeys(named, expected)
        for name, value_P in outputs.metrics_P.items():
            named[f"metrics_P[{name!r}]"], shapes[f"metrics_P[{name!r}]"] = value_P, expected[:1]
        for name, value_P in named.items():
            shape = list(shapes[name])
            if not isinstance(value_P, Tensor):
                raise TypeError(f"{name} is of type {type(value_P).__name__}; expected a tensor of shape {shape}")
            if list(value_P.shape) != shape:
                raise ValueError(f"{name} has shape {list(value_P.shape)}; expected {shape}")
        if outputs.masked_P.dtype != torch.bool:
            raise ValueError(f"masked_P has dtype {outputs.masked_P.dtype}; expected torch.bool")
        weighted_P = outputs.loss_P if weights_P is None else outputs.loss_P * weights_P
        gradients = _gradients(weighted_P, inputs, divisor)
        if gradients is None:
            raise ValueError("loss_P does not depend on trainer_log_probabilities_P; expected a loss with a gradient")
        return outputs, gradients


def _gradients(weighted_P: Tensor, inputs: LossInputs, divisor: float) -> Gradients | None:
    """Returns the gradients of the sum over `divisor`; None if it does not depend on the log-probabilities."""
    if not weighted_P.requires_grad:
        return None
    candidates = (inputs.trainer_log_probabilities_P, inputs.entropies_P, inputs.values_P)
    differentiated = [value_P is not None and value_P.requires_grad for value_P in candidates]
    leaves = [
        value_P for value_P, chosen in zip(candidates, differentiated, strict=True) if chosen and value_P is not None
    ]
    found = iter(torch.autograd.grad(weighted_P.sum() / divisor, leaves, allow_unused=True))
    by_log_probabilities, by_entropies, by_values = (next(found) if chosen else None for chosen in differentiated)
    if by_log_probabilities is None:
        return None
    return Gradients(by_log_probabilities, by_entropies, by_values)
