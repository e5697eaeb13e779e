"""Memory for large answers, mapped before bytes are read into it, so that the event loop never waits for a page.

The first access to a page makes the kernel find and clear it. If the kernel must first move other pages away, that takes
most of a second (`docs/performance.md`). So a thread accesses the pages first, some way ahead of the bytes that have
arrived: the announced length of an answer reserves addresses, no memory. Whole huge pages at addresses that are multiples of
their size are cleared in a third of the time of small ones, and freed in a fifth.

While a thread maps pages, the loop waits for the kernel's lock on the address space whenever it reserves or frees memory. So
the memory of answers that nothing refers to any more is kept, up to a bound, for the next ones: they need no thread.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from dataclasses import dataclass

import numpy as np

HUGE_PAGE_BYTES = 1 << 21

LARGE_BYTES = HUGE_PAGE_BYTES
"""Smaller bodies come from `malloc`, which has most of its pages already."""

AHEAD_BYTES = 8 * HUGE_PAGE_BYTES
"""Mapped at a time. An answer of usual size is mapped at once, since each further part waits for a thread."""

KEPT_BYTES = 1 << 29
"""Most bytes that are kept for further answers."""

UNUSED_SHARE = 0.25
"""Most of a kept region that an answer may leave unused."""


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """Memory of which the first `mapped` bytes are mapped; addresses without memory follow up to a whole huge page."""

    memory: mmap.mmap
    mapped: int


_kept: list[_Region] = []
"""Regions that nothing refers to, the oldest first. Any thread may add one, even within another's `_keep`: as it drops the last
view of it, or as its garbage is collected. So only single operations of the list are used, which nothing interrupts."""


class LargeMemory:
    """`length` bytes of any content, of which the first `ready` are mapped: all if a kept region fits, else none at first."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.ready = 0
        self.view: memoryview
        """All `length` bytes, as soon as any are ready. The memory is kept or freed with the last view of it."""
        region = _take_kept(length)
        if region is not None:
            self._use(region.memory)
            self._keep_afterwards(region)

    def extend(self) -> None:
        """Maps the next `AHEAD_BYTES`. Raises `MemoryError` if the system has no room for `length` bytes.

        Blocks for a millisecond for every 20 MB, or longer; without the GIL.
        """
        if not self.ready:
            self._use(_reserve(self.length))
        ready = min(self.ready + AHEAD_BYTES, self.length)
        self._array[self.ready : ready : mmap.PAGESIZE] = 0
        self.ready = ready
        if ready == self.length:
            self._keep_afterwards(_Region(self._memory, self.length))

    def _use(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._array = np.frombuffer(memory, dtype=np.uint8)  # every view refers to it
        self.view = self._array.data[: self.length]

    def _keep_afterwards(self, region: _Region) -> None:
        self.ready = self.length
        weakref.finalize(self._array, _keep, region).atexit = False
        del self._array, self._memory


def _take_kept(length: int) -> _Region | None:
    """Returns the smallest kept region that fits, if there is one."""
    fitting = [region for region in _kept.copy() if length <= region.mapped <= length / (1 - UNUSED_SHARE)]
    for region in sorted(fitting, key=lambda region: region.mapped):
        with contextlib.suppress(ValueError):  # another thread was faster
            _kept.remove(region)
            return region
    return None


def _keep(region: _Region) -> None:
    """Keeps a region whose last view is gone, and frees the oldest ones beyond the bound."""
    if region.mapped > KEPT_BYTES:
        return
    _kept.append(region)
    excess = sum(each.mapped for each in _kept.copy()) - KEPT_BYTES
    while excess > 0 and _kept:
        with contextlib.suppress(IndexError):  # another thread was faster
            excess -= _kept.pop(0).mapped


def _reserve(length: int) -> mmap.mmap:
    # The kernel aligns a multiple of a huge page. The last part of one stays in small pages, so no memory is wasted.
    whole = length // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    reserved = -(-length // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        memory = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"this machine has no room for {length} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, 0, whole)
    return memory
