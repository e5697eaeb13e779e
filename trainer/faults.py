"""Which errors are a lack of memory, and which end the process: the rest concern one run alone."""

from __future__ import annotations

import torch

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch's CPU allocator, CUDA and cuBLAS say where no `OutOfMemoryError` is raised."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may do."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def is_fatal(error: Exception) -> bool:
    """Whether the accelerator is lost to this process: after such an error every other call on it raises one, too."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
