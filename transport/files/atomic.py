"""Files and directories that appear whole or not at all: written beside, flushed to disk, renamed.

Every file of the run directory is written by this module (`docs/contracts.md`, "Directories"), so that a process killed at
any moment leaves the last good state and, at worst, a hidden `.partial` sibling that no reader opens.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # a small process has no other use for numpy, whose import took a fifth of its start
    import numpy.typing as npt

Buffer: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[Any]"
"""Bytes by reference. An array must be C-contiguous."""

STABLE = "STABLE"
"""The marker whose presence makes a directory exist for its readers."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a disk, or a quota, that has no space left."""

DISK_FAULTS = FULL | {errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of a disk, or of a limit, at which nothing is written."""

_KEPT = ".kept"
"""The end of the name of a removed directory in which NFS keeps open files, after eight digits."""

_BUFFERS_A_CALL = 512
"""The buffers that one call writes: fewer than IOV_MAX (1024 on Linux), and few enough that the list is built quickly."""

_BYTES_A_CALL = 64 * 2**20
"""A limit, so that a signal is handled between calls even if the disk stalls."""

_FLUSHES_AT_ONCE = 8


def write_atomically(path: Path, *buffers: Buffer, durable: bool = True, mode: int = 0o666, new: bool = False) -> None:
    """Writes `buffers`, one after the other, as the file `path`, replacing an existing one. Copies and joins nothing.

    Without `durable` the file appears whole all the same, but the call does not wait for the disk, and a crash of the
    machine may lose it. `mode` is the file's, less the umask. A `new` one replaces none: raises `FileExistsError` if there is
    one, even if it was written at the same time. Raises `OSError` (disk full, no permission); `path` is then as it was. Blocks
    on the disk: not for an event loop.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            write_buffers(descriptor, buffers)
            if durable:
                sync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            os.link(partial, path)
            partial.unlink()
        else:
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)


def disk_fault(error: Exception) -> int | None:
    """Returns which of `DISK_FAULTS` an error is, also one of a library in Rust; None if it is none of them."""
    if isinstance(error, OSError):
        return error.errno if error.errno in DISK_FAULTS else None
    return next((number for number in DISK_FAULTS if f"(os error {number})" in str(error)), None)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names `path` in an error of the disk in the block that names no file: Python's where a write fails, and safetensors'."""
    try:
        yield
    except Exception as error:
        number = disk_fault(error)
        if number is None:
            raise
        if not isinstance(error, OSError):
            raise OSError(number, os.strerror(number), str(path)) from error
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def publish_directory(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yields an empty directory beside `path`; at the block's end it becomes `path`, flushed, with its `STABLE` marker.

    Without `durable` it appears whole all the same, but the call does not wait for the disk: until `flush_directory`, a
    crash of the machine may damage it.

    When the block raises, nothing appears. Raises `FileExistsError` when `path` is already published: a published directory
    never changes under a reader, so remove it first (`remove_directory`). One writer a path at a time.
    """
    if (path / STABLE).exists():
        raise FileExistsError(f"{path} is already published; a published directory is never overwritten")
    partial = path.with_name(f".{path.name}.partial")
    remove_directory(partial)  # left by a writer that was killed
    partial.mkdir(parents=True)
    try:
        with naming(partial):
            yield partial
        (partial / STABLE).touch()
        if durable:
            _flush_below(partial)
        remove_directory(path)  # without STABLE: a removal that was cut short
        partial.replace(path)
    except BaseException:
        remove_directory(partial)
        raise
    if durable:
        flush(path.parent)


def flush_directory(path: Path) -> None:
    """Makes a directory durable that was published without `durable`. Raises `OSError`. Blocks on the disk."""
    _flush_below(path)
    flush(path.parent)


def make_readable(directory: Path) -> None:
    """Gives a model's weights the mode of its `config.json`: safetensors makes them readable by their owner alone."""
    mode = (directory / "config.json").stat().st_mode
    for weights in directory.glob("*.safetensors"):
        weights.chmod(mode)


def prune_steps(parent: Path, keep: int, every: int | None) -> None:
    """Removes all published `step_N` but the newest `keep` and, if given, the multiples of `every`. Raises `OSError`."""
    for step in published_steps(parent)[:-keep]:
        if every is None or step % every:
            remove_directory(parent / f"step_{step}")


def remove_directory(path: Path) -> None:
    """Removes a directory, its `STABLE` marker first, so that an interrupted removal leaves nothing that counts.

    A missing directory is no error, nor is one that another process removes at the same time. On NFS a file that this machine
    has open or mapped stays in its directory under another name until it is closed: the directory is then moved aside, and
    removed with a later one of the same parent.
    """
    (path / STABLE).unlink(missing_ok=True)
    for kept in path.parent.glob(f".*.{'[0-9a-f]' * 8}{_KEPT}"):
        shutil.rmtree(kept, ignore_errors=True)
    if not path.is_dir():
        return
    try:
        shutil.rmtree(path, onerror=_unless_gone)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise
        kept = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_KEPT}")
        with suppress(FileNotFoundError):  # another process has moved it
            path.rename(kept)
        shutil.rmtree(kept, ignore_errors=True)  # the rest of it


def _unless_gone(_call: object, _path: str, raised: tuple[type[BaseException], BaseException, object]) -> None:
    """Raises what a part of a removal has raised, unless that part is gone."""
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


def published_steps(parent: Path) -> list[int]:
    """Returns the N of every published `step_N` directory in `parent`, ascending; none if no directory can be listed there."""
    try:
        names = os.listdir(parent)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP):
            return []
        raise
    steps = (name.removeprefix("step_") for name in names if name.startswith("step_"))
    return sorted(
        int(step)
        for step in steps
        if step.isascii() and step.isdigit() and os.path.exists(f"{parent}/step_{step}/{STABLE}")
    )


def write_buffers(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """Writes all of `buffers` to a file descriptor by `os.writev`, by reference and without the GIL.

    Raises `OSError`, which names the file.
    """
    pending = [view for view in map(as_bytes_view, buffers) if view.nbytes]
    start = 0
    while start < len(pending):
        stop, nbytes = start, 0
        while stop < len(pending) and stop - start < _BUFFERS_A_CALL and nbytes < _BYTES_A_CALL:
            nbytes += pending[stop].nbytes
            stop += 1
        try:
            written = os.writev(descriptor, pending[start:stop])
        except OSError as error:
            error.filename = _name_of(descriptor)
            raise
        while start < stop and written >= pending[start].nbytes:
            written -= pending[start].nbytes
            start += 1
        if written:  # the kernel may stop inside a buffer
            pending[start] = pending[start][written:]


def sync(descriptor: int) -> None:
    """Waits until what was written to a file descriptor is on the disk. Raises `OSError`, which names the file. Blocks."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = _name_of(descriptor)
        raise


def _name_of(descriptor: int) -> str | None:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return None


def as_bytes_view(buffer: Buffer) -> memoryview:
    """Returns a flat view of the bytes of `buffer`, without a copy.

    Raises `ValueError` for an array that is not C-contiguous.
    """
    view = memoryview(buffer)  # type: ignore[arg-type]  # numpy says from Python 3.12 on that an array is a buffer
    if not view.c_contiguous:
        raise ValueError(f"an array of shape {view.shape} and strides {view.strides} is not C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")  # what is empty cannot be cast


def _flush_below(directory: Path) -> None:
    """Flushes all files at once, so that the disk's journal is waited for once or twice, and not for each file."""
    list(_flushing.threads.map(_flush_data, [directory, *directory.rglob("*")]))


def _flush_data(path: Path) -> None:
    """Flushes a regular file or a directory.

    Skips what is neither, or may not be read: a guest may put a link, a FIFO or a socket among its files.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EACCES):
            return
        raise
    try:
        if stat.S_IFMT(os.fstat(descriptor).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
            sync(descriptor)
    finally:
        os.close(descriptor)


class _Flushing(threading.local):
    """Each thread that publishes has threads of its own that flush, so that a disk which hangs holds up no other's flushes.

    They are kept: beside a busy loop, starting four of them takes as long as their flushes.
    """

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(_FLUSHES_AT_ONCE, thread_name_prefix="flush")


_flushing = _Flushing()


def _renew_flushing() -> None:
    """Makes new threads in a forked process, which has none of its parent's."""
    global _flushing
    _flushing = _Flushing()


os.register_at_fork(after_in_child=_renew_flushing)


def flush(path: Path) -> None:
    """Waits until a file, or the entries of a directory, are on the disk. Raises `OSError`. Blocks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
