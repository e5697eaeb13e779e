"""One run's optimizer: AdamW or SGD in float32, with gradient clipping. The values of an update come with its call.

Source of AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. bfloat16 parameters have a float32 master
copy, and their gradients accumulate in float32: in bfloat16 an update by a thousandth of a weight rounds to zero. A bfloat16
number is the upper half of a float32 number, so of a master only the lower half is stored: weight 2, master 2, gradient 4 and
AdamW's moments 8 make 16 bytes a parameter. The update puts the halves together for a piece of a parameter at a time.

With `offload`, moments and lower halves are in the host's memory, and each piece of them comes to the device for its update. The
arithmetic is the same, so are the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from counterpoint.run.items import AdamW, Sgd, UpdateValues

Kind = Literal["adamw", "sgd"]


KIND_OF: dict[type[UpdateValues], Kind] = {AdamW: "adamw", Sgd: "sgd"}


def check_values(values: UpdateValues) -> None:
    """Raises `ValueError` for values that would put what is no number, or a step uphill, into the weights."""
    momenta = values.betas if isinstance(values, AdamW) else (values.momentum,)
    above_0 = (values.clip, values.eps) if isinstance(values, AdamW) else (values.clip,)
    fits = 0 <= values.rate < math.inf and 0 <= values.decay < math.inf
    if not (fits and all(0 <= each < 1 for each in momenta) and all(each > 0 for each in above_0)):
        raise ValueError(
            f"{values}: expected a rate and a decay of 0 or more, betas or a momentum from 0 to below 1, clip and eps above 0"
        )


Shapes = Mapping[str, Sequence[int]]
"""The shapes of a state's tensors by their names."""

STATE_KEYS: dict[Kind, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "sgd": ("momentum_buffer",)}
"""The state that each kind of optimizer has for a parameter."""


class Optimizer:
    """Owns the gradients of a run's parameters: backward passes accumulate into it until `step` or `zero_grad`."""

    def __init__(self, parameters: dict[str, nn.Parameter], kind: Kind = "adamw", *, offload: bool = False) -> None:
        """Optimizes `parameters`, by name. Weight decay applies to matrices only, not to norms and biases.

        Raises `ValueError`: a parameter is neither float32 nor bfloat16.
        """
        self.kind = kind
        self.parameters = parameters
        self.offload = offload
        self._sums: dict[str, Tensor] = {}
        """Gradients of bfloat16 parameters, float32."""
        self._lower: dict[str, Tensor] = {}
        """Lower halves of their masters, int16."""
        self._state: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
        for name, parameter in parameters.items():
            if parameter.dtype == torch.bfloat16:
                self._lower[name] = self._placed(torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False))
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, self._sums, name))
            elif parameter.dtype != torch.float32:
                raise ValueError(f"weight {name} is {parameter.dtype}; expected torch.float32 or torch.bfloat16")

    def gradients(self) -> list[Tensor]:
        """Returns the accumulated gradients in the order of the parameters, float32; zeros where a parameter had no part."""
        return [self._gradient(name) for name in self.parameters]

    def gradient_norm(self) -> Tensor:
        """Returns the global 2-norm of the gradients, a float32 scalar."""
        return torch.nn.utils.get_total_norm(self.gradients())

    @torch.no_grad()
    def step(self, norm: Tensor, values: UpdateValues) -> None:
        """Clips the gradients, whose norm is `norm`, and applies one update with these values, which are of the own kind."""
        if KIND_OF[type(values)] != self.kind:
            raise TypeError(f"values of {KIND_OF[type(values)]!r} for an optimizer of kind {self.kind!r}")
        clip = (values.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(self.gradients(), clip)
        whole = {name: None for name in self.parameters if not self.offload and name not in self._lower}
        for decays in (True, False):
            self._update_whole([name for name in whole if self._decays(name) is decays], values, decays)
        for name in self.parameters:
            if name not in whole:
                self._update_by_pieces(name, values)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drops the accumulated gradients."""
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def master(self, name: str) -> Tensor:
        """Returns a parameter in float32: itself, or put together from its halves on its device."""
        parameter = self.parameters[name].detach()
        return parameter if name not in self._lower else _joined(parameter, self._lower[name].to(parameter.device))

    def state(self) -> dict[str, Tensor]:
        """Returns all state as tensors: `master.<name>`, and after the first step `<key>.<name>` for each of `STATE_KEYS`.

        A master that is put together is in the host's memory, where there is room for all of them.
        """
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()  # what the last update has sent to the host
        tensors: dict[str, Tensor] = {}
        for name in self.parameters:
            tensors[f"master.{name}"] = self.master(name).cpu() if name in self._lower else self.master(name)
            tensors |= {f"{key}.{name}": value for key, value in self._state[name].items()}
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restores what `state` returned, and sets the parameters from it.

        Raises:
            ValueError: a tensor is missing, left over or of another shape: the state is of another model, adapter or optimizer.
        """
        held = self.check_state({name: tensor.shape for name, tensor in tensors.items()})
        for name, parameter in self.parameters.items():
            saved = tensors[f"master.{name}"]
            if name in self._lower:
                weight, lower = _halves(saved.to(parameter.device))
                parameter.copy_(weight)
                self._lower[name].copy_(lower)
            else:
                parameter.copy_(saved)
            state = {key: tensors[f"{key}.{name}"] for key in held}
            self._state[name] = {
                key: value.to(parameter.device) if key == "step" else self._placed(value.to(self._home(parameter)))
                for key, value in state.items()
            }

    def check_state(self, shapes: Shapes) -> Sequence[str]:
        """Raises as `load_state`, by the tensors' shapes alone. Returns the keys of the state that all parameters have."""
        self._check_masters(shapes)
        return self._check_moments(shapes)

    def _check_masters(self, shapes: Shapes) -> None:
        for name, parameter in self.parameters.items():
            saved = shapes.get(f"master.{name}")
            if saved is None or [*saved] != [*parameter.shape]:
                found = "is missing" if saved is None else f"has shape {[*saved]}"
                raise ValueError(
                    f"weight {name} {found}; this model has {list(parameter.shape)}: compare model and "
                    "training.lora.target_modules"
                )
        held = {name.removeprefix("master.") for name in shapes if name.startswith("master.")}
        if left_over := sorted(held - self.parameters.keys()):
            raise ValueError(
                f"it holds the trained weight {left_over[0]} ({len(left_over)} such), which this run does not train; put "
                "training.lora.target_modules back, or train another run"
            )

    def _check_moments(self, shapes: Shapes) -> Sequence[str]:
        """Returns the keys of the state that all parameters have; none before the first step. Raises `ValueError`."""
        own, all_keys = STATE_KEYS[self.kind], [key for keys in STATE_KEYS.values() for key in keys]
        held = {key for key in all_keys for name in self.parameters if f"{key}.{name}" in shapes}
        if other := sorted(held - {*own}):
            raise ValueError(f"it holds {other[0]}, which training.optimizer = {self.kind!r} does not have")
        for name, parameter in self.parameters.items() if held else ():
            for key in own:
                saved, expected = shapes.get(f"{key}.{name}"), [] if key == "step" else [*parameter.shape]
                if saved is None or [*saved] != expected:
                    found = "is missing" if saved is None else f"has shape {[*saved]}"
                    raise ValueError(f"{key} of weight {name} {found}; expected {expected}")
        return own if held else ()

    def _gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if name in self._lower:
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            return self._sums[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _decays(self, name: str) -> bool:
        return self.parameters[name].ndim >= 2

    def _home(self, parameter: Tensor) -> torch.device:
        """Returns where the state of a parameter is."""
        return torch.device("cpu") if self.offload else parameter.device

    def _placed(self, tensor: Tensor) -> Tensor:
        """Moves a tensor to where state is; in the host's memory so that the device can copy it by itself."""
        if not self.offload:
            return tensor
        return tensor.cpu().pin_memory() if torch.cuda.is_available() else tensor.cpu()

    def _begin(self, name: str, values: UpdateValues) -> dict[str, Tensor]:
        """Returns the state of a parameter, which is made at the first update, with its step counted."""
        state, parameter = self._state[name], self.parameters[name]
        if not state:
            for key in STATE_KEYS[self.kind]:
                if key == "step":
                    state[key] = torch.zeros((), device=parameter.device)
                elif isinstance(values, AdamW) or values.momentum:
                    state[key] = self._placed(torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False))
        return state

    def _update_whole(self, names: list[str], values: UpdateValues, decays: bool) -> None:
        if names:
            states = [self._begin(name, values) for name in names]
            masters = [self.parameters[name].detach() for name in names]
            _update(values, decays, masters, [self._gradient(name) for name in names], states)

    def _update_by_pieces(self, name: str, values: UpdateValues) -> None:
        """Updates a parameter whose master is in two halves, or whose state is in the host's memory."""
        state, weight = self._begin(name, values), self.parameters[name].detach()
        lower, sums = self._lower.get(name), self._gradient(name)
        step = state.get("step")
        for piece in _pieces(weight):
            weight_N = piece(weight)
            stored = {key: piece(value) for key, value in state.items() if key != "step"}
            here = {key: value.to(weight.device, non_blocking=True) for key, value in stored.items()}
            if step is not None:
                here["step"] = step.clone()  # the update counts it
            master_N = weight_N
            if lower is not None:
                master_N = _joined(weight_N, piece(lower).to(weight.device, non_blocking=True))
            _update(values, self._decays(name), [master_N], [piece(sums)], [here])
            if lower is not None:
                upper_N, lower_N = _halves(master_N)
                weight_N.copy_(upper_N)
                piece(lower).copy_(lower_N, non_blocking=True)
            for key, value in stored.items():
                if here[key] is not value:
                    value.copy_(here[key], non_blocking=True)
        if step is not None:
            step.add_(1)


def _move_gradient(sums: dict[str, Tensor], name: str, accumulated: Tensor) -> None:
    assert accumulated.grad is not None
    if name in sums:
        sums[name].add_(accumulated.grad)
    else:
        sums[name] = accumulated.grad.float()
    accumulated.grad = None


PIECE = 2**24
"""Elements of a parameter that are updated at once where their masters are put together or their state is moved. A multiple of
64, so that the CPU's kernels round alike for pieces and for the whole."""


def _pieces(like: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yields functions that take the same piece out of each tensor of this shape, as a view."""
    for first in range(0, max(like.numel(), 1), PIECE):
        yield partial(_piece, first=first)


def _piece(tensor: Tensor, first: int) -> Tensor:
    return tensor.view(-1)[first : first + PIECE]


def _joined(weight: Tensor, lower: Tensor) -> Tensor:
    """Returns the float32 master of a bfloat16 weight and the lower half, which may be negative as the weight is rounded."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(lower).view(torch.float32)


def _halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nearest bfloat16 of a float32 tensor (of two, the one further from zero), and what `_joined` adds to it.

    Nearest even, as torch rounds, would leave open to which side a master in the middle of two belongs.
    """
    bits = master.view(torch.int32)
    weight = bits.add(0x8000).bitwise_right_shift_(16).to(torch.int16)
    lower = bits.sub(weight.to(torch.int32).bitwise_left_shift_(16)).to(torch.int16)
    return weight.view(torch.bfloat16), lower


def _update(
    values: UpdateValues,
    decays: bool,
    masters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
) -> None:
    """Updates masters and states in place."""
    weight_decay = values.decay if decays else 0.0
    if isinstance(values, Sgd):
        buffers = [state.get("momentum_buffer") for state in states]
        sgd(
            masters, gradients, buffers, weight_decay=weight_decay, momentum=values.momentum, lr=values.rate,
            dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip
        return
    averages, squares, steps = ([state[key] for state in states] for key in STATE_KEYS["adamw"])
    adamw(
        masters, gradients, averages, squares, [], steps, fused=True, amsgrad=False, beta1=values.betas[0],
        beta2=values.betas[1], lr=values.rate, weight_decay=weight_decay, eps=values.eps, maximize=False,
    )  # fmt: skip
