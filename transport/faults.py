"""Which of the system's errors last, so that trying again would meet them again, and which may pass.

A role that a lasting one stops ends with the exit code of a bad configuration, and its supervisor leaves it at that.
"""

from __future__ import annotations

import errno

LASTING = frozenset(
    {errno.EACCES, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)
"""Paths and permissions that somebody has to mend. A port in use, a full disk, a lock that another process holds, a file
system that is away for a moment are none of them."""


def is_lasting(error: OSError) -> bool:
    """Whether the error would come again until somebody mends its cause."""
    return error.errno in LASTING
