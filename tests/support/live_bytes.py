"""Counts the bytes of tensors that live at once while a block runs, exactly and on any device.

It sees each tensor that an operation of torch returns, also in the backward pass on a CPU, and when its memory is given back.
What a kernel uses inside itself is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes(known) as live:` counts from zero; the memory of the tensors `known` is left out."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        """Does not count what exists already, which `known` must name."""
        super().__init__()
        self.now = 0
        self.peak = 0
        self.largest: dict[int, int] = {}
        """How many memories of each size there were; by bytes."""
        self._references: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._add(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carries out an operation and counts what it returns."""
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._add(value, value.untyped_storage().nbytes())
        return result

    def _add(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._references:
            return

        def forget(_: object) -> None:
            self.now -= nbytes
            self._references.pop(key, None)

        self._references[key] = weakref.ref(storage, forget)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        if nbytes:
            self.largest[nbytes] = self.largest.get(nbytes, 0) + 1
