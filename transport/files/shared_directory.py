"""A directory of a job in which several roles write, which may run as different users."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def make_shared(directory: Path) -> None:
    """Makes `directory`, unless it is there: whoever may write to the one above it may write to it.

    If it is ours, also one that was made before, it gets the owner, the group and the rights of the one above, as far as we may
    give them: a trainer that runs as root so keeps no other role out. Raises `OSError`.
    """
    with suppress(FileExistsError):
        directory.mkdir()
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        own, above = os.fstat(descriptor), directory.parent.stat()
        if own.st_uid != os.geteuid():
            return
        with suppress(OSError):  # another group is for its members to give, another owner for root
            os.fchown(descriptor, -1, above.st_gid)
        with suppress(OSError):
            os.fchmod(descriptor, stat.S_IMODE(above.st_mode) | stat.S_IRWXU)
        with suppress(OSError):
            os.fchown(descriptor, above.st_uid, -1)
    finally:
        os.close(descriptor)
