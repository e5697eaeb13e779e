"""Whether this machine's shared memory, a file system in memory, has room for a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def is_memory(directory: Path) -> bool:
    """Whether the files of a directory are held in memory, as those of many machines' temporary directory are."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return any(fields[2] == number and fields[fields.index("-") + 1] == "tmpfs" for fields in mounts)


def lack_of_room(nbytes: int, place: Path = SHARED_MEMORY) -> str:
    """Returns why a file of `nbytes` should not be made in `place`, a directory in memory; empty if it may.

    It has to fit the file system, and leave half of the memory that the machine has available.
    """
    about = os.statvfs(place)
    if (free := about.f_bavail * about.f_frsize) < nbytes:
        return f"{nbytes} bytes are needed, {free} are free in {place}"
    found = re.search(rb"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_bytes(), re.MULTILINE)
    if found is not None and (available := int(found[1]) * 1024) < 2 * nbytes:
        return f"{nbytes} bytes are needed, and the machine has {available} bytes of memory available, of which half is left"
    return ""
