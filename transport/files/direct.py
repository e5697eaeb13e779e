"""Writes many bytes past the kernel's page cache, which is twice as fast as through it (`docs/performance.md`).

The disk reads the memory itself, in whole blocks at aligned addresses, which arrays and frames do not have. So the kernel
gathers the bytes into one of two staging areas, without the GIL, while the disk reads the other. Each area is written by a
thread of its own as soon as it is full, so that the disk need not wait until a thread has the GIL again beside a busy loop.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

from counterpoint.transport.files.atomic import Buffer, as_bytes_view, write_buffers

_DIRECT_FROM_BYTES = 32 * 2**20
"""Smaller files are written through the page cache, which takes half the time for 10 MB and as long for 60 MB."""
_AREA_BYTES = 4 * 2**20
"""So small that the disk soon has its first bytes, and that an area is still in the processor's cache when it is written."""
_BLOCK_BYTES = 4096
"""The block size of the writes: a multiple of that of any disk."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_new_file(path: Path, buffers: Sequence[Buffer]) -> None:
    """Writes `buffers`, one after the other, as a new file. Does not flush.

    The page cache is bypassed for a large file, if file system and kernel allow it. Raises `OSError`.
    Blocks on the disk.
    """
    descriptor = os.open(path, _NEW, 0o666)
    try:
        append(descriptor, buffers)
    finally:
        os.close(descriptor)


def append(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """Writes `buffers`, one after the other, at the end of an open file that nothing else writes. Does not flush.

    Many bytes bypass the page cache, as those of `write_new_file`. A file that is not empty must be readable. Raises `OSError`,
    and what was appended is then undefined. Blocks on the disk.
    """
    views = [view for view in map(as_bytes_view, buffers) if view.nbytes]
    if sum(view.nbytes for view in views) < _DIRECT_FROM_BYTES or not _append_directly(descriptor, views):
        os.lseek(descriptor, 0, os.SEEK_END)
        write_buffers(descriptor, views)


@contextmanager
def _past_the_cache(descriptor: int) -> Iterator[None]:
    """Has writes of the block bypass the page cache. Raises `OSError` where the file system cannot."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _append_directly(descriptor: int, views: Sequence[memoryview]) -> bool:
    """Writes past the page cache. Returns False, with nothing written, where the system has no staging areas or no direct writes.

    `vm.memfd_noexec = 2` forbids the areas.
    """
    end = os.fstat(descriptor).st_size
    begun = end % _BLOCK_BYTES
    # The last block is written once more, with what follows in it.
    whole = [memoryview(os.pread(descriptor, begun, end - begun)), *views] if begun else views
    with ExitStack() as resources:
        try:
            areas = [resources.enter_context(_Area()) for _ in range(2)]
            resources.enter_context(_past_the_cache(descriptor))
        except OSError:
            return False
        disk = resources.enter_context(ThreadPoolExecutor(len(areas), thread_name_prefix="direct write"))
        written: dict[_Area, Future[None]] = {}
        offset = end - begun
        for area, portion in zip(cycle(areas), _portions(whole), strict=False):
            if area in written:
                written[area].result()
            filled = area.fill(portion)
            written[area] = disk.submit(area.empty_into, descriptor, filled, offset)
            offset += filled
        for one in written.values():
            one.result()
    os.ftruncate(descriptor, offset)  # the last block was written whole
    return True


def _portions(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yields the bytes of `views` in lists of pieces that fill an area each, the last one shorter."""
    portion: list[memoryview] = []
    room = _AREA_BYTES
    for view in views:
        while view.nbytes >= room:
            portion.append(view[:room])
            yield portion
            view, portion, room = view[room:], [], _AREA_BYTES
        if view.nbytes:
            portion.append(view)
            room -= view.nbytes
    if portion:
        yield portion


class _Area:
    """Memory that is also a file, so that the kernel gathers many buffers into it in one call."""

    def __init__(self) -> None:
        self._file = os.memfd_create("staging", os.MFD_CLOEXEC)
        os.ftruncate(self._file, _AREA_BYTES)
        self._memory = mmap.mmap(self._file, _AREA_BYTES)

    def __enter__(self) -> _Area:
        return self

    def __exit__(self, *error: object) -> None:
        self._memory.close()
        os.close(self._file)

    def fill(self, portion: Sequence[memoryview]) -> int:
        """Copies the bytes of `portion` into the area; returns their number."""
        os.lseek(self._file, 0, os.SEEK_SET)
        write_buffers(self._file, portion)
        return sum(view.nbytes for view in portion)

    def empty_into(self, descriptor: int, filled: int, offset: int) -> None:
        """Writes the first `filled` bytes, up to a whole block, at `offset` of the file."""
        length = -(-filled // _BLOCK_BYTES) * _BLOCK_BYTES
        with memoryview(self._memory) as memory:
            written = 0
            while written < length:
                with memory[written:length] as rest:
                    written += _write(descriptor, rest, offset + written)


def _write(descriptor: int, data: memoryview, offset: int) -> int:
    """Writes once; goes on through the page cache where the kernel refuses to bypass it.

    Some file systems refuse only the write. After a write that ended inside a block, as at a limit of the file's size, the
    kernel refuses every direct write, and only a write through the cache fails with the true cause. Raises `OSError`.
    """
    try:
        return os.pwrite(descriptor, data, offset)
    except OSError as error:
        # Not whether the descriptor is direct: the other area's thread may have changed that already.
        if error.errno != errno.EINVAL:
            raise
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return os.pwrite(descriptor, data, offset)
