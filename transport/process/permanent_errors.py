"""Which of the system's errors are permanent, so that another attempt would fail in the same way, and which may pass.

A role that a permanent error stops ends with the exit code of a bad configuration, and its supervisor does not restart it.
"""

from __future__ import annotations

import errno

LASTING = frozenset(
    {errno.EACCES, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)
"""Errors of paths and permissions, which somebody has to mend. Not in the list: a port in use, a full disk, a lock that another
process holds, a file system that is away for a moment."""


def is_permanent(error: OSError) -> bool:
    """Whether the error would come again until somebody mends its cause."""
    return error.errno in LASTING
