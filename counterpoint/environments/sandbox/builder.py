"""The builder of a box: a root of its own in which commands run, in phases; no process of a phase outlives it.

`box` is the caller's side, and starts one builder for each box. It enters a user's and a mount's namespace, and builds the root:
programs of this machine, read-only, and a file system in memory for the rest. Each phase has namespaces of processes, network
and mounts of its own, with a first process that is ours (`phase`) and starts the commands. A phase ends with that process, upon
which the kernel kills all others of its namespace before the builder goes on. What only a later phase may read or write, the
builder puts there between the phases, where nobody else is.

Without root, commands have the same user as the builder and own what it makes. So nothing that a later phase runs through rests
on owners: it is read-only (programs, /etc, /dev), made anew for each phase (/proc, /dev/shm, the first process, namespaces), or
made anew between them (`_renew`).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from counterpoint.environments.sandbox import namespaces
from counterpoint.environments.sandbox.phase import NOSUID_NODEV, PYTHON, asked_of, say, serve_phase

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
HOME = "/root"
TESTS_HOME = "/logs/home"
"""A home for the phase after `_renew`, new and empty."""
DIRECTORIES = (
    *("/boot", "/home", "/media", "/mnt", "/opt", HOME, "/run", "/run/lock", "/srv", "/tmp", "/var", "/var/backups"),
    *("/var/cache", "/var/lib", "/var/local", "/var/log", "/var/mail", "/var/opt", "/var/spool", "/var/tmp"),
)
"""What Debian's base image has for files, parents first. Files of commands lie there and beside them."""
MOST_FILE_BYTES = 1 << 20
"""The longest file that is given to the caller."""
_ETC = (
    "alternatives",
    "ssl",
    "ld.so.cache",
    "ld.so.conf",
    "localtime",
    "nsswitch.conf",
    "os-release",
    "debian_version",
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INODES, _LATER_INODES, _LATER_BYTES = 200_000, 20_000, 64 << 20
"""Files of a box, and the room beyond that which phases after `_renew` have, whatever the phases before used up."""


def main() -> None:
    """Runs the builder. The first argument is the settings of `box.Box` as JSON; standard input, the socket to the caller."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    try:
        _enter(control)
        _build(settings)
    except OSError as error:
        say(control, {"refused": str(error)})
        raise SystemExit(1) from error
    say(control, {})
    while (asked := asked_of(control)) is not None:
        try:
            answer = _serve_box(control, asked, settings)
        except OSError as error:
            answer = {"refused": f"{asked['do']}: {error}"}
        with suppress(BrokenPipeError):  # the caller has ended
            say(control, answer)


def _serve_box(control: socket.socket, asked: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Does what is asked of the builder between phases, and returns the answer. A phase takes the requests until its end."""
    if asked["do"] == "phase":
        serve_phase(control, settings)
        return {"ended": True}
    if asked["do"] == "renew":
        _renew(settings, asked["aside"])
        return {}
    return _read(settings["root"], asked["path"])


def _enter(control: socket.socket) -> None:
    Path("/proc/self/oom_score_adj").write_text("1000")
    namespaces.unshare(namespaces.CLONE_NEWUSER, "user")
    namespaces.set_process_option(namespaces.PR_SET_DUMPABLE, 1)
    control.sendall(b"unshared")
    if control.recv(16) != b"mapped":
        raise SystemExit(1)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    with suppress(PermissionError):  # where only one user is mapped, groups cannot be given up
        os.setgroups([])
    # The root's directories are for everybody in the box, whatever the caller's own files are.
    os.umask(0o022)
    namespaces.unshare(namespaces.CLONE_NEWNS | namespaces.CLONE_NEWCGROUP, "mount, cgroup")
    namespaces.mount("none", "/", None, namespaces.MS_REC | namespaces.MS_PRIVATE)


def _build(settings: Mapping[str, Any]) -> None:
    """Mounts the root at `root`. What is mounted in it can be neither moved nor replaced, whoever owns the root."""
    root, user = settings["root"], settings["user"]
    namespaces.mount(
        "box", root, "tmpfs", NOSUID_NODEV, f"size={settings['files_bytes']},nr_inodes={_INODES},mode=1777"
    )
    directories = {name: os.path.realpath(name) if os.path.isdir(name) else root + name for name in SYSTEM}
    directories[PYTHON] = settings["python"] or root + PYTHON
    for name, source in directories.items():
        os.mkdir(root + name)
        # A recursive bind: one that leaves out what is mounted below is refused without the machine's own rights.
        namespaces.mount(source, root + name, None, namespaces.MS_BIND | namespaces.MS_REC)
        namespaces.make_read_only(root + name)
    for name in ("/proc", "/dev", "/etc", "/tests", "/logs"):
        os.mkdir(root + name)
    for name in ("/tests", "/logs"):
        namespaces.mount(root + name, root + name, None, namespaces.MS_BIND)
    for name in (*DIRECTORIES, "/logs/agent", "/logs/artifacts"):
        os.mkdir(root + name)
        os.chown(root + name, user, user)
    os.chown(f"{root}/logs", user, user)
    _build_etc(f"{root}/etc", user)
    _build_devices(f"{root}/dev")


def _build_etc(etc: str, user: int) -> None:
    namespaces.mount("etc", etc, "tmpfs", NOSUID_NODEV, "size=4m,mode=755")
    for name in _ETC:
        source = Path("/etc", name)
        if not source.exists():
            continue
        Path(etc, name).mkdir() if source.is_dir() else Path(etc, name).touch()
        namespaces.mount(os.path.realpath(source), f"{etc}/{name}", None, namespaces.MS_BIND | namespaces.MS_REC)
    users = {0: "root", user: "root" if user == 0 else "agent"}
    lines = [f"{name}:x:{number}:{number}::{HOME}:/bin/bash\n" for number, name in users.items()]
    Path(etc, "passwd").write_text("".join(lines))
    Path(etc, "group").write_text("".join(f"{name}:x:{number}:\n" for number, name in users.items()))
    Path(etc, "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    namespaces.make_read_only(etc)


def _build_devices(place: str) -> None:
    namespaces.mount("dev", place, "tmpfs", namespaces.MS_NOSUID, "size=1m,mode=755")
    for name in _DEVICES:
        Path(place, name).touch()
        namespaces.mount(f"/dev/{name}", f"{place}/{name}", None, namespaces.MS_BIND)
    os.mkdir(f"{place}/shm")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{place}/{name}")
    os.symlink("/proc/self/fd", f"{place}/fd")
    namespaces.make_read_only(place)


def _renew(settings: Mapping[str, Any], aside: Sequence[str]) -> None:
    """Makes anew what later phases read and run through and what is not read-only, whatever the phases before made of it.

    /tests and /logs are new; of /logs, what was written for others stays. What has one of the names `aside` at the root gets
    another one. The root's directories are there, and there is room. No process of a phase lives, so nothing changes meanwhile;
    no link is followed.
    """
    root, user = settings["root"], settings["user"]
    room = f"size={settings['files_bytes'] + _LATER_BYTES},nr_inodes={_INODES + _LATER_INODES}"
    namespaces.mount("box", root, None, namespaces.MS_REMOUNT | NOSUID_NODEV, room)
    os.chmod(root, 0o1777)
    for name in aside:
        with suppress(FileNotFoundError):
            os.rename(f"{root}/{name}", f"{root}/.aside-{os.urandom(8).hex()}")
    for name in DIRECTORIES:
        place = root + name
        if not stat.S_ISDIR(_mode(place)):
            with suppress(FileNotFoundError):
                os.unlink(place)
            os.mkdir(place)
            os.chown(place, user, user)
        os.chmod(place, stat.S_IMODE(_mode(place)) | 0o700)
    kept = {}
    logs = os.open(f"{root}/logs", os.O_PATH | os.O_DIRECTORY)
    for name in ("agent", "artifacts"):
        with suppress(OSError):
            kept[name] = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=logs)
    os.close(logs)
    for name in ("tests", "logs"):
        namespaces.mount(name, f"{root}/{name}", "tmpfs", NOSUID_NODEV, f"size={settings['files_bytes']},mode=755")
    for place in ("/tests", TESTS_HOME, "/logs/agent", "/logs/artifacts", "/logs/verifier"):
        if place != "/tests":
            os.mkdir(root + place)
        os.chown(root + place, user, user)
    for name, descriptor in kept.items():
        namespaces.mount(f"/proc/self/fd/{descriptor}", f"{root}/logs/{name}", None, namespaces.MS_BIND)
        os.close(descriptor)


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def _read(root: str, path: str) -> dict[str, Any]:
    """The text of a file of the box, between phases; none where it is no regular file, or too long. No link is followed."""
    *parents, name = [part for part in path.split("/") if part]
    place = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        for parent in parents:
            below = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = below
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    except OSError as error:
        return {"text": None} if error.errno == errno.ENOENT else {"text": None, "why": f"{path}: {error.strerror}"}
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        return {"text": None, "why": f"{path} is no regular file"}
    with open(file, "rb") as opened:
        text = opened.read(MOST_FILE_BYTES + 1)
    if len(text) > MOST_FILE_BYTES:
        return {"text": None, "why": f"{path} has more than {MOST_FILE_BYTES} bytes"}
    return {"text": text.decode(errors="replace")}
