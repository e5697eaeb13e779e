"""Compiles the decoder layers of a model (torch.compile), each by itself: equal layers share their graphs, whatever their number.

A graph is made for rows of any length. A pass without gradients takes the graph of training: another one would round otherwise,
so that the policy before a step would differ from the one that the step begins with. What differs from row to row stays outside
of it, between the compiled parts of a layer: attention over samples of other lengths, where ranks that share a row gather its
keys and values, and the experts of a mixture with their recorded routing, where tokens go to the ranks that own their experts.
Hooks on a layer, such as FSDP's, and its checkpointing surround the compiled function. Adapters stay outside, too, since a row
may be of any runs: what is between them is compiled.

Source: compilation by layers, Liang et al., "TorchTitan: One-stop PyTorch native solution for production ready LLM pre-training",
2024.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.modeling_layers import GradientCheckpointingLayer

from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.model.attention import SampleLengths
from counterpoint.trainer.model.compiler import failing_aloud, reason_of
from counterpoint.trainer.model.context import ContextGroup, Stretch, shared_rows
from counterpoint.trainer.model.load import log_probabilities
from counterpoint.trainer.model.passes import Passes
from counterpoint.trainer.model.text_part import text_config

logger = logging.getLogger(__name__)

LEAST_BOUND = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Nats, by precision: allowed difference of a compiled log-probability, even if rounding is smaller."""

ROUNDING_FACTOR = 4.0
"""How many times more a compiled log-probability may differ than one whose layers' results are rounded otherwise."""

PROBED_TOKENS = 22
"""Of the row that is compared. No size of a layer is that, or half of it, since the compiler takes equal sizes for one."""


def compile_layers(model: nn.Module, passes: Passes | None = None, context: ContextGroup | None = None) -> None:
    """Compiles the layers of a model, and tests it by a row, with its gradient. Those of which this was tried stay as they are.

    Frozen token embeddings have to `differentiate_inputs`, so that all layers have the same graphs.

    If that fails, such as without a C++ compiler, or computes something else, the reason is logged and the layers stay as before.
    With the `passes` of a model that is divided, or of which the ranks of `context` share rows, every rank calls it. Where it
    fails on one, none are compiled on the ranks that make their passes together: all of a divided model, else those of a row.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        logger.warning("compile = true: %s has no decoder layers", type(model).__name__)
        return
    left_out = [_leave_adapters_out(layer) for layer in layers]
    if all(left_out) and hasattr(layers[0], "computes"):
        return
    if passes is not None:
        passes.begin()
    with shared_rows(model, context), failing_aloud():
        reason = _compile_and_compare(model, layers)
    if passes is not None and passes.end(bool(reason)):
        # Then this rank's values are wrong, too, so it cannot tell whose fault a difference is.
        others = "another rank has failed, as its log says"
        reason = f"{reason}, or {others}" if reason else others
    model.zero_grad(set_to_none=True)
    if not reason:
        logger.info("%d layers of %s are compiled", len(layers), type(model).__name__)
        return
    for layer in layers:
        layer.computes = None
    logger.warning("compile = true: the layers of %s are not compiled: %s", type(model).__name__, reason)


def _compile_and_compare(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    """Compiles `layers`; returns why they must not stay so, or nothing."""
    try:
        with torch.no_grad():
            expected_P = _row(model)
            with _rounded_otherwise(layers):
                rounding = float((_row(model) - expected_P).abs().max())
        for layer in layers:
            _compile(layer)
        found_P = _row(model)
        found_P.sum().backward()
    except Exception as error:  # of torch's compiler, or the C++ compiler that it calls
        if is_fatal(error):
            raise
        return reason_of(error)
    difference = float((found_P.detach() - expected_P).abs().max())
    bound = max(LEAST_BOUND[next(model.parameters()).dtype], ROUNDING_FACTOR * rounding)
    if difference <= bound:
        return ""
    return f"log-probabilities differ by {difference:.2g} nats from those without (at most {bound:.2g})"


@contextmanager
def _rounded_otherwise(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Moves the results of the layers by up to one step of their precision, as another order of sums may, in passes inside."""
    generator = torch.Generator().manual_seed(0)

    def moved(_layer: nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        signs = torch.randint(0, 2, hidden.shape, generator=generator).to(hidden.device) * 2 - 1
        result = hidden * (1 + signs.to(hidden.dtype) * torch.finfo(hidden.dtype).eps)
        return (result, *output[1:]) if isinstance(output, tuple) else result

    handles = [layer.register_forward_hook(moved) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leave_adapters_out(layer: nn.Module) -> bool:
    """Cuts the compiled layer at its adapters; returns whether all were left out before."""
    new = [each for each in layer.modules() if isinstance(each, MultiLora) and "forward" not in each.__dict__]
    for adapted in new:
        adapted.forward = torch.compiler.disable(adapted.forward)
    return not new


def computes(layer: nn.Module) -> Any:
    """Returns what computes a layer: the compiled function if there is one, else its class's own."""
    compiled = getattr(layer, "computes", None)
    if compiled is None:
        return partial(type(layer).forward, layer)
    return compiled if torch.is_grad_enabled() else partial(_without_gradients, compiled)


def _without_gradients(compiled: Any, hidden_1TH: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Computes a layer by the graph of training. What it keeps for a backward pass is gone with the layer."""
    with torch.enable_grad():
        output = compiled(hidden_1TH.detach().requires_grad_(), *args, **kwargs)
    return tree_map_only(Tensor, Tensor.detach, output)


def compile_untested(model: nn.Module, compiler: Callable[..., Any]) -> None:
    """Compiles the layers by what is called as torch.compile, as `compile_layers` does, and compares nothing."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            _leave_adapters_out(layer)
            _compile(layer, compiler)


def _compile(layer: nn.Module, compiler: Callable[..., Any] | None = None) -> None:
    for name, module in layer.named_modules():
        if type(module).__name__.endswith("Router"):
            block = layer.get_submodule(name.rpartition(".")[0])
            block.forward = torch.compiler.disable(block.forward)
    # dynamic: otherwise a second length of a row compiles anew.
    compiled = (compiler or torch.compile)(type(layer).forward, dynamic=True)
    # Weak: a model in a cycle would keep its memory for a while after another one is loaded.
    layer.computes = partial(_compute, weakref.ref(layer), compiled)
    if "forward" not in layer.__dict__:  # it is not checkpointed
        layer.forward = partial(_call, weakref.ref(layer))


def _compute(
    owner: weakref.ref[nn.Module],
    compiled: Any,
    *args: Any,
    sample_lengths: list[int],
    stretch: Stretch | None = None,
    **kwargs: Any,
) -> Any:
    return compiled(owner(), *args, sample_lengths=SampleLengths(sample_lengths, stretch), **kwargs)


def _call(owner: weakref.ref[nn.Module], *args: Any, **kwargs: Any) -> Any:
    layer = owner()
    assert layer is not None
    return computes(layer)(*args, **kwargs)


def _row(model: nn.Module) -> Tensor:
    """Log-probabilities of a row of two made-up samples."""
    device = next(model.parameters()).device
    tokens_T = torch.randint(
        0, text_config(model).vocab_size, (PROBED_TOKENS,), generator=torch.Generator().manual_seed(0)
    ).to(device)
    positions_T = torch.arange(PROBED_TOKENS // 2, device=device).repeat(2)
    every = torch.arange(PROBED_TOKENS - 1, device=device)
    values_P, _ = log_probabilities(model, tokens_T, positions_T, [PROBED_TOKENS // 2] * 2, every, tokens_T[1:], 1.0)
    return values_P
