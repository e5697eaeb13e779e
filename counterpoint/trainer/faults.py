"""Distinguishes a lack of memory, and errors that end the process, from errors that fail one run alone."""

from __future__ import annotations

import torch

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages of torch's CPU allocator, CUDA and cuBLAS that are not raised as `OutOfMemoryError`."""


_WAITED_IN_VAIN = ("Timed out waiting", "Application timeout caused pair closure")
"""What gloo says of a call that other ranks did not join in time, and of those after it."""

_LOST = (*_WAITED_IN_VAIN, "gloo/transport")
"""What it says of calls that cannot be made any more."""


class LacksMemory(RuntimeError):
    """A rank lacks memory whatever is trained, so the trainer cannot go on, and no run is to blame."""


class ModelLost(RuntimeError):
    """The model was given back and cannot be loaded again, such as for a missing file, so the trainer cannot go on."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error is a lack of memory, so that a smaller piece of work may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def has_waited_in_vain(error: Exception) -> bool:
    """Returns whether another rank has not joined a collective call in time."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WAITED_IN_VAIN)


def has_lost_ranks(error: Exception) -> bool:
    """Returns whether this rank cannot reach another one any more, for whatever reason."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def is_fatal(error: Exception) -> bool:
    """Returns whether this process has lost the accelerator, the other ranks, its model or memory: all calls would fail."""
    if isinstance(error, LacksMemory | ModelLost) or has_lost_ranks(error):
        return True
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
