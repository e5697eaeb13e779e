"""A file system that keeps what is removed while it is open, as NFS does: under another name in the same directory."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

PREFIX = ".nfs"
_unlink, _stat = os.unlink, os.stat


def keep_removed_files(patch: pytest.MonkeyPatch) -> None:
    """Has `os.unlink` rename a file that this process has open or mapped, and refuse to remove one that was renamed so."""

    def unlink(path: Any, *, dir_fd: int | None = None) -> None:
        name = os.path.basename(os.fspath(path))
        if not is_held(_stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino):
            return _unlink(path, dir_fd=dir_fd)
        if name.startswith(PREFIX):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fspath(path))
        kept = os.path.join(os.path.dirname(os.fspath(path)), f"{PREFIX}{secrets.token_hex(12)}")
        os.rename(path, kept, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    for name in ("unlink", "remove"):
        patch.setattr(os, name, unlink)


def is_held(inode: int) -> bool:
    """Whether this process has a file open or mapped, its directories apart."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    if any(line.split()[4] == str(inode) for line in maps):
        return True
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if _stat(f"/proc/self/fd/{descriptor}").st_ino == inode:
                return True
        except FileNotFoundError:  # that of the listing
            continue
    return False
