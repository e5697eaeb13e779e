"""What the host gives to a GPU, and what it counts there, without waiting for it.

A GPU computes what was asked of it, in order, while the host asks for more. Each value that the host reads, and each copy out of
memory that can be paged, waits until all that was asked for is computed, and then the GPU waits for the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def on_device(given: Tensor | npt.NDArray[Any], device: torch.device) -> Tensor:
    """Returns a tensor of the CPU, or an array, on `device`; on a CPU it is the same memory."""
    tensor = torch.from_numpy(given) if isinstance(given, np.ndarray) else given
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # torch keeps this memory until the copy is made
    return tensor.to(device, non_blocking=True)


@lru_cache(maxsize=4096)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of these values, which nobody may change; the newest of them are kept, so that equal rows copy nothing."""
    return on_device(torch.tensor(values, dtype=dtype, device="cpu"), device)


def counts_of(index_N: Tensor, length: int) -> Tensor:
    """Returns how often each number below `length` is in `index_N`, int64 `[length]`; `torch.bincount` would wait."""
    return index_N.new_zeros(length).scatter_add_(0, index_N, torch.ones_like(index_N))
