"""Activation checkpointing: keeps a decoder layer's input, and may keep its attention; the rest is computed again for gradients.

What a layer computes depends on more than its input: on which tokens belong to which adapter
(`counterpoint/trainer/lora/multi_lora.py`: `adapter_spans`), on the recorded routing
(`counterpoint/trainer/model/router_replay.py`), and on where tokens go whose experts other ranks own
(`counterpoint/trainer/model/exchange.py`). These are of one row, and are gone, or of another row, when that row's backward pass
begins. So each call keeps them, and its recomputation has them again. How attention is kept:
`counterpoint/trainer/model/kernels/kept.py`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from counterpoint.trainer.model.adapters.adapted_layer import MultiLora, applied
from counterpoint.trainer.model.compiled import computes
from counterpoint.trainer.model.exchange import Exchange, Route, rerouted, routes_of
from counterpoint.trainer.model.kernels.kept import Kept, keeping
from counterpoint.trainer.model.router_replay import RouterReplay


def checkpoint_layers(model: nn.Module, replay: RouterReplay | None, count: int | None = None) -> None:
    """Makes the first `count` decoder layers of `model` keep only their inputs and what their attention returned.

    Without `count` all layers keep only their inputs, which takes the least memory. Layers that get adapters later do the same.
    The last layers keep theirs best: the backward pass frees them first, before it computes others again.

    Raises:
        ValueError: the model has no layers that can be computed again, or fewer than `count`.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer that can be computed again; set activation_checkpointing = false"
        )
    if count is not None and count > len(layers):
        raise ValueError(
            f"activation_checkpointing = {count}: {type(model).__name__} has {len(layers)} layers; set so many at most, or true"
        )
    for layer in layers[:count]:
        # Weak: a model in a cycle would keep its memory for a while after another one is loaded.
        layer.forward = partial(_checkpointed, weakref.ref(layer), replay, count is not None)


def _checkpointed(
    owner: weakref.ref[nn.Module], replay: RouterReplay | None, keeps_attention: bool, *args: Any, **kwargs: Any
) -> Any:
    layer = owner()
    assert layer is not None
    forward = computes(layer)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    adapted = [module for module in layer.modules() if isinstance(module, MultiLora)]
    spans = adapted[0].spans if adapted else None  # one row's, so the same for all
    record = replay.record if replay is not None else None
    routes: dict[Exchange, Route | None] = {}
    kept: Kept | None = deque() if keeps_attention else None

    @contextmanager
    def as_now() -> Iterator[None]:
        recorded = nullcontext() if replay is None else replay.with_record(record)
        with applied(adapted, spans), rerouted(routes), recorded, keeping(kept, again=True):
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return keeping(kept, again=False), as_now()

    # Nothing in the layer is random: the model is in evaluation mode.
    output = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)
    routes |= routes_of(layer)
    return output
