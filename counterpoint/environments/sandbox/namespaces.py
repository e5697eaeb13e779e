"""System calls that Python's standard library lacks: namespaces, mounts, capabilities. Each failure names the call."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38

_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522

INNER_ROOT, INNER_USER = 0, 1000
"""Ids inside: of the zygote, which sets up runs, and of the code if the caller is root."""
NOBODY = 65534

MACHINES = tuple(_SYS_PIVOT_ROOT)

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int, what: str) -> None:
    """Moves this process, or its children, into new namespaces. `what` names them in an error."""
    _checked(f"unshare({what})", _libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mounts."""
    arguments = (source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags))
    _checked(f"mount {source} on {target}", _libc.mount(*arguments, options and options.encode()))


def make_read_only(target: str) -> None:
    """Makes a mount and all mounts below it read-only. Linux 5.12 or newer."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _checked(f"make {target} read-only", result)


def change_root(new_root: str) -> None:
    """Makes a mount the root; nothing of the old one can be reached any more."""
    os.chdir(new_root)
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _checked("pivot_root", _libc.syscall(ctypes.c_long(number), b".", b"."))
    _checked("umount of the old root", _libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def set_process_option(option: int, value: int) -> None:
    """Calls `prctl`."""
    _checked(f"prctl({option}, {value})", _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def drop_capabilities() -> None:
    """Gives up every capability."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    number = _SYS_CAPSET[os.uname().machine]
    _checked("capset", _libc.syscall(ctypes.c_long(number), ctypes.byref(header), ctypes.byref(none)))
