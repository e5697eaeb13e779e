"""What is mounted where: tells what is missing from what is not mounted yet, and local disks from network file systems."""

from __future__ import annotations

import os
import re
from pathlib import Path

FSTAB = Path("/etc/fstab")
MOUNTS = Path("/proc/self/mounts")


def unmounted(path: str | os.PathLike[str]) -> Path | None:
    """Returns the directory at or above a missing path where a file system may still have to be mounted; None if there is none.

    It is one that `/etc/fstab` names and where none is mounted, one in which an automounter mounts, or an empty one, as mount
    points are, with nothing else of the path below it.
    """
    above = [place := Path(path).absolute(), *place.parents]
    named, automatic = _second_words(FSTAB), _second_words(MOUNTS, "autofs")
    for place in above:
        if str(place) in automatic or (str(place) in named and not os.path.ismount(place)):
            return place
    nearest = next(place for place in above if place.exists())
    try:
        return nearest if nearest.is_dir() and not any(nearest.iterdir()) else None
    except OSError:  # it may not be read, so nobody can tell
        return None


def file_system(path: Path) -> str:
    """Returns the kind of the file system that has a path, such as `ext4` or `nfs4`; empty where nobody says it."""
    try:
        rows = [line.split() for line in MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    kinds = {_unescaped(row[1]): row[2] for row in rows if len(row) > 2}  # of several at one place, the last is seen
    return next((kinds[str(each)] for each in (path.resolve(), *path.resolve().parents) if str(each) in kinds), "")


def _second_words(table: Path, kind: str = "") -> set[str]:
    """Returns the mount points of a table of mounts, of file systems of one kind if it is given."""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    rows = [line.split() for line in lines if not line.lstrip().startswith("#")]
    return {_unescaped(row[1]) for row in rows if len(row) > 2 and row[1] != "/" and kind in ("", row[2])}


def _unescaped(word: str) -> str:
    """Returns a path as it is: in tables a blank is a number in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)
