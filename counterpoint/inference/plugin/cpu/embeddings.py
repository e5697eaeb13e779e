"""An embedding beside an output layer of its own keeps its matrix once.

vLLM's build for a CPU packs every embedding for a product, as if it were the output layer: a second copy of what is often the
largest matrix, which each update would pack and each proof of the weights would read through the kernel.
"""

from __future__ import annotations

from torch import nn
from torch.nn.functional import linear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def keep_embeddings_once(model: nn.Module) -> None:
    """Gives up the packed copies of embeddings, unless the model has no other output layer. A product still has its result."""
    layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    if any(isinstance(layer, ParallelLMHead) for layer in layers):
        for layer in layers:
            if type(layer) is VocabParallelEmbedding:
                layer.cpu_linear = linear
