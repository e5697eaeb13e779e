"""Has torch compute the same bits again from the same input, by `trainer.deterministic`.

The trainer's own computations need nothing more: sums by index have a fixed order then, torch compiles without measuring which
kernel is fastest, and attention takes the deterministic backward pass (`counterpoint/trainer/model/kernels/packages.py`).
"""

from __future__ import annotations

import os

import torch

_LACKING = ("does not have a deterministic implementation", "Deterministic behavior was enabled with")
"""Torch says so of an operation that has no deterministic algorithm, and of one that cuBLAS has none for."""


def use_deterministic_algorithms(wanted: bool) -> None:
    """Chooses torch's deterministic algorithms, or the fastest ones, for this process, before it computes anything on a GPU."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS reads at its first product
        torch.backends.cudnn.benchmark = False
        torch.utils.deterministic.fill_uninitialized_memory = False
    if wanted != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(wanted)


def advice_on(error: BaseException) -> str:
    """Returns what to do about an operation that has no deterministic algorithm, to follow the error; nothing of other errors."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _LACKING):
        return "; trainer.deterministic = true asks for it: set it to false, or train without what computes this"
    return ""
