"""Small matrices of a CPU's server stay as they are in memory, where vLLM would pack each for a kernel of its own.

A product with a packed matrix is faster only if the matrix is large. Each update of the weights would pack it anew (0.2 ms
however small it is), and the proof of the weights would read it through the kernel: as much as a hundred products save.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers import utils

LARGEST = 40_000
"""Elements of a matrix up to which torch's product took at most a tenth longer, for 1 to 256 rows, and half as long for a few."""


def leave_small_matrices() -> None:
    """Has layers of vLLM, in this process, compute by torch with float32 matrices of at most `LARGEST` elements."""
    former = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.ndim == 2 and weight.dtype == torch.float32 and not weight.is_meta and weight.numel() <= LARGEST:
            layer.cpu_linear = linear
        else:
            former(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch
