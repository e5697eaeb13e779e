"""Distinguishes a lack of memory, and errors that end the process, from errors that fail one run alone."""

from __future__ import annotations

import torch

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages of torch's CPU allocator, CUDA and cuBLAS that are not raised as `OutOfMemoryError`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error is a lack of memory, so that a smaller piece of work may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def is_fatal(error: Exception) -> bool:
    """Returns whether this process can no longer use the accelerator: every further call would fail, too."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
