"""Loads weights into a model's own parameters, where that gives the same numbers as vLLM's layerwise reload in less time.

vLLM's reload holds for every kind of layer: it takes each apart, counts what a loader would write, loads into new memory,
processes that as at the start and copies it back. A layer that is not quantized computes with the checkpoint's own numbers. On a
GPU its parameters are as they were made. On a CPU its matrix was packed for a kernel and given up: it is made again, to be loaded
and packed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

_PLAIN = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""How a layer uses its weights that computes with the checkpoint's own; a kind derived from one of these may do otherwise."""


def loads_in_place(model: nn.Module) -> bool:
    """Returns whether every layer computes with the checkpoint's numbers, in parameters that are as they were made, or packed."""
    return all(_is_plain(layer) for layer in model.modules())


def _is_plain(layer: nn.Module) -> bool:
    if type(getattr(layer, "quant_method", None)) not in _PLAIN:
        return False
    if is_deferred_attention_layer(layer) and type(layer) is not Attention:
        return False
    made, _ = get_layerwise_info(layer).restore_metadata
    own = dict(layer.named_parameters(recurse=False))
    return all(
        name in own and (_is_packed(layer, name) or (own[name].shape, own[name].dtype) == (each.shape, each.dtype))
        for name, each in made.items()
    )


def _is_packed(layer: nn.Module, name: str) -> bool:
    """Whether a kernel for a CPU holds the matrix, and the parameter is empty."""
    return name == "weight" and hasattr(layer, "cpu_linear") and not layer.weight.numel()


def load_in_place(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Loads a whole checkpoint into a `model` that `loads_in_place`."""
    processed = [layer for layer in model.modules() if getattr(layer, "quant_method", None) is not None]
    processed = [
        layer for layer in processed if getattr(layer, "cpu_linear", None) is not linear
    ]  # it uses the parameter
    with torch.no_grad():
        for layer in processed:
            if _is_packed(layer, "weight"):
                info = get_layerwise_info(layer)
                with info.restore_device:
                    made = materialize_meta_tensor(info.restore_metadata[0]["weight"])
                layer.register_parameter("weight", restore_layer_refs(made, layer))
        model.load_weights(weights)
        for layer in processed:
            layer.quant_method.process_weights_after_loading(layer)
