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

_kept: dict[int, list[mmap.mmap]] = {}
"""Wholly mapped regions that nothing refers to, by their size. Any thread may add one, as it drops the last view of it."""


class LargeMemory:
    """`length` bytes of any content, of which the first `ready` are mapped: all if a kept region fits, else none at first."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.ready = 0
        self.view: memoryview
        """All `length` bytes, as soon as any are ready. The memory is kept or freed with the last view of it."""
        region = _take_kept(length)
        if region is not None:
            self._use(region)
            self._all_ready()

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
            self._all_ready()

    def _use(self, region: mmap.mmap) -> None:
        self._region = region
        self._array = np.frombuffer(region, dtype=np.uint8)  # every view refers to it
        self.view = self._array.data[: self.length]

    def _all_ready(self) -> None:
        self.ready = self.length
        weakref.finalize(self._array, _keep, self._region).atexit = False
        del self._array, self._region


def _take_kept(length: int) -> mmap.mmap | None:
    """Returns the smallest kept region that fits, if there is one."""
    for size in sorted(size for size in list(_kept) if length <= size <= length / (1 - UNUSED_SHARE)):
        with contextlib.suppress(KeyError, IndexError):  # another thread was faster
            return _kept[size].pop()
    return None


def _keep(region: mmap.mmap) -> None:
    """Keeps a region whose last view is gone, unless there are enough."""
    for size in [size for size, regions in list(_kept.items()) if not regions]:
        _kept.pop(size, None)
    if sum(size * len(regions) for size, regions in list(_kept.items())) + len(region) <= KEPT_BYTES:
        _kept.setdefault(len(region), []).append(region)


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
