"""Counts the bytes of live tensors on one kind of device, exactly: of each memory once, from its first tensor to its last.

On torch's `meta` device nothing is allocated or computed, so `counterpoint/job/plan/dry_run.py` finds a trainer's memory by
running its own code for a model of any size. On a CPU the same counts what a real step holds (`tests/job/plan`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_GROUPED_MM = torch.ops.aten._grouped_mm.default


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]  # torch does not type it
    """Counts inside its block, in the thread that entered it: a CPU's and the meta device's backward passes run there as well."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.now = 0
        """Bytes of the tensors that live."""
        self.peak = 0
        self._device = device
        self._known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Has compiled functions called inside of it, which it would keep from being compiled otherwise."""
        return True

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were made outside."""
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _GROUPED_MM and args[0].is_meta:
            result: Any = _grouped_product(*args[:3], **(kwargs or {}))  # its own takes bfloat16 only
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._known[key] = weakref.ref(storage, partial(self._free, key, nbytes))
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, nbytes: int, _reference: object) -> None:
        del self._known[key]
        self.now -= nbytes


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """The shape of rows times a matrix for each group, or, of two matrices, of a product for each group."""
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[-1])
    return left.new_empty(len(offs), left.shape[0], right.shape[-1])
