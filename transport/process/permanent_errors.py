"""Tells permanent errors of the system, at which another attempt would fail in the same way, from passing ones.

A role that a permanent error stops ends with the exit code of a bad configuration, and its supervisor does not restart it. One
that a full disk stops ends with `DISK_FULL`, and is started again until there is space; one that a passing error stops, with
`PASSING`.
"""

from __future__ import annotations

import errno

from counterpoint.transport.errors import Obstructed
from counterpoint.transport.files.atomic import FULL
from counterpoint.transport.files.mounts import unmounted

LASTING = frozenset(
    {errno.EACCES, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)
"""Errors of paths and permissions, which a person has to correct. Not in the list: a port in use, a full disk, a lock that
another process holds, a file system that is unreachable for a moment."""

NOTHING_LEARNED = 65
"""Exit code of a run whose first groups show no difference to learn from, as those of another start would not; `EX_DATAERR`."""

DISK_FULL = 74
"""Exit code of a process that a full disk stopped; `EX_IOERR` of sysexits.h."""

PASSING = Obstructed.code
"""Exit code of a process that an obstacle stopped which the next attempt may not meet, such as a port in use."""


def exit_code_of(error: Exception) -> int:
    """Returns the exit code of a role that this error of its files or its values stopped."""
    if is_disk_full(error):
        return DISK_FULL
    if isinstance(error, OSError | ValueError) and is_final(error):
        return 2
    return PASSING if is_passing(error) else 1


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that a disk is full.

    Libraries in Rust, such as safetensors, name the system's error in their text alone.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if any(f"(os error {number})" in str(error) for number in FULL):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def disk_full(place: object) -> str:
    """Returns the sentence that tells a person about a full disk, on which `place` lies."""
    return f"disk full at {place}: waiting; free space, or stop the job (Ctrl-C)"


def not_written(error: Exception, place: object) -> str:
    """Returns what tells a person which file could not be written, or, where the error names none, that `place` could not."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot write to {error.filename}: {error.strerror}"
    return f"cannot write to {place}: {error}"


def way_on(error: Exception) -> str:
    """Returns what a person does about an error by which a role ends; empty unless it says that a disk is full."""
    return "; free space, and --resume goes on" if is_disk_full(error) else ""


def is_permanent(error: OSError) -> bool:
    """Whether the error would come again until a person corrects its cause, and not only until a file system is mounted."""
    return error.errno in LASTING and not _is_early(error)


def _is_early(error: OSError) -> bool:
    """Whether the error is of a path below a mount point where nothing is mounted yet, which only root may write to."""
    by_mount = error.errno in (errno.ENOENT, errno.EACCES, errno.EROFS)
    return by_mount and isinstance(error.filename, str) and unmounted(error.filename) is not None


def is_final(error: OSError | ValueError) -> bool:
    """Whether a start that this error stopped would fail again until a person corrects its cause.

    So it is for a permanent error and for a wrong value, but not for a value that could not be checked because of a passing one.
    """
    return is_permanent(error) if isinstance(error, OSError) else not is_passing(error)


def is_passing(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is an obstacle that the next attempt may not meet.

    It is one if there was no answer in time, a connection was lost, or a file system could not be reached or is not mounted yet.
    Another file that does not exist is not.
    """
    while error is not None:
        if isinstance(error, TimeoutError | ConnectionError) or (isinstance(error, OSError) and _is_early(error)):
            return True
        if isinstance(error, OSError) and error.errno not in LASTING | {errno.ENOENT, None}:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
