"""The builder of a box: a root of its own in which commands run, in phases; no process of a phase outlives it.

`box` is the caller's side, and starts one builder for each box. It enters a user's and a mount's namespace, and builds the root:
programs of this machine, read-only, and a file system in memory for the rest. Each phase has namespaces of processes, network
and mounts of its own, with a first process that is ours (`_first_process`) and starts the commands. A phase ends with
that process, upon which the kernel kills all others of its namespace before the builder goes on. What only a later phase may read
or write, the builder puts there between the phases, where nobody else is.

Without root, commands have the same user as the builder and own what it makes. So nothing that a later phase runs through rests
on owners: it is read-only (programs, /etc, /dev), made anew for each phase (/proc, /dev/shm, the first process, namespaces), or
made anew between them (`_renew`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from counterpoint.environments.sandbox import namespaces, seccomp
from counterpoint.transport.frames import Framing

MESSAGES = Framing(1 << 28)
"""Requests and answers: a header as JSON; an archive of files (tar) follows the request `files`."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
PYTHON = "/python"
"""Where the interpreter is, if it is not below /usr."""
PROGRAMS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
HOME = "/root"
TESTS_HOME = "/logs/home"
"""A home for the phase after `_renew`, new and empty."""
DIRECTORIES = (
    *(
        "/boot",
        "/home",
        "/media",
        "/mnt",
        "/opt",
        HOME,
        "/run",
        "/run/lock",
        "/srv",
        "/tmp",
        "/var",
        "/var/backups",
        "/var/cache",
    ),
    *("/var/lib", "/var/local", "/var/log", "/var/mail", "/var/opt", "/var/spool", "/var/tmp"),
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
_READ_BYTES = 1 << 16
_NOT_STARTED = 126
"""The exit code of a command that could not be started, as a shell has it."""
_NOSUID_NODEV = namespaces.MS_NOSUID | namespaces.MS_NODEV
_INODES, _LATER_INODES, _LATER_BYTES = 200_000, 20_000, 64 << 20
"""Files of a box, and the room beyond that which phases after `_renew` have, whatever the phases before used up."""
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_PR_CAPBSET_DROP = 24
_MOST_CAPABILITY = 63


def main() -> None:
    """Runs the builder. The first argument is the settings of `box.Box` as JSON; standard input, the socket to the caller."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    try:
        _enter(control)
        _build(settings)
    except OSError as error:
        _say(control, {"refused": str(error)})
        raise SystemExit(1) from error
    _say(control, {})
    while (asked := _asked(control)) is not None:
        try:
            answer = _serve_box(control, asked, settings)
        except (OSError, tarfile.TarError) as error:
            answer = {"refused": f"{asked['do']}: {error}"}
        with suppress(BrokenPipeError):  # the caller has ended
            _say(control, answer)


def _serve_box(control: socket.socket, asked: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Does what is asked of the builder between phases, and returns the answer. A phase takes the requests until its end."""
    if asked["do"] == "phase":
        _phase(control, settings)
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
        "box", root, "tmpfs", _NOSUID_NODEV, f"size={settings['files_bytes']},nr_inodes={_INODES},mode=1777"
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
    namespaces.mount("etc", etc, "tmpfs", _NOSUID_NODEV, "size=4m,mode=755")
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
    namespaces.mount("box", root, None, namespaces.MS_REMOUNT | _NOSUID_NODEV, room)
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
        namespaces.mount(name, f"{root}/{name}", "tmpfs", _NOSUID_NODEV, f"size={settings['files_bytes']},mode=755")
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


def _phase(control: socket.socket, settings: Mapping[str, Any]) -> None:
    """Runs a phase to its end: all its processes are dead when this returns."""
    holder = os.fork()
    if holder:
        os.waitpid(holder, 0)
        return
    try:
        namespaces.set_process_option(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
        flags = namespaces.CLONE_NEWNS | namespaces.CLONE_NEWNET | namespaces.CLONE_NEWIPC | namespaces.CLONE_NEWPID
        namespaces.unshare(flags, "mount, net, ipc, pid")
        first = os.fork()
        if first == 0:
            _first_process(control, settings)
        # The namespace is empty once its first process is collected.
        os.waitpid(first, 0)
    finally:
        os._exit(0)


def _first_process(control: socket.socket, settings: Mapping[str, Any]) -> NoReturn:
    """Serves the requests of a phase, in the root of the box, as the first process of its namespace."""
    try:
        namespaces.set_process_option(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
        namespaces.set_process_option(namespaces.PR_SET_DUMPABLE, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel ignores it then, as every signal without a handler
        _forget_arguments()
        root = settings["root"]
        namespaces.mount("proc", f"{root}/proc", "proc", _NOSUID_NODEV)
        namespaces.mount("shm", f"{root}/dev/shm", "tmpfs", _NOSUID_NODEV, f"size={settings['files_bytes']},mode=1777")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
        namespaces.change_root(root)
        sys.meta_path.clear()  # whatever would be imported from now on could be a file of the commands'
        if os.path.isdir(settings["python"]):
            # The interpreter's scripts name it by its place on this machine, where commands may have made one of their own.
            namespaces.mount(PYTHON, settings["python"], None, namespaces.MS_BIND | namespaces.MS_REC)
        _hide_programs_of_commands()
        _say(control, {})
        while (asked := _asked(control)) is not None and asked["do"] != "end":
            _say(control, _serve(control, asked, settings))
    except BaseException as error:  # noqa: BLE001 - the caller is told, and the phase ends
        with suppress(OSError):
            _say(control, {"refused": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _hide_programs_of_commands() -> None:
    """Takes programs of this machine away that are links to where commands may write, such as /opt."""
    writable = os.stat("/").st_dev
    for directory in (f"{PYTHON}/bin", *PROGRAMS):
        with suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_symlink() and entry.is_file() and entry.stat().st_dev == writable:
                    namespaces.mount("/dev/null", entry.path, None, namespaces.MS_BIND)


def _forget_arguments() -> None:
    """Empties this process's command line, which names files of this machine, and which everyone in the box may read."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(after_name[field - 3]) for field in (48, 49))  # numbered as in proc(5)
    ctypes.memset(start, 0, end - start)


def _serve(control: socket.socket, asked: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    if asked["do"] == "files":
        archive = MESSAGES.read(control.recv) or b""
        return _run(control, {**asked, "seconds": 600.0, "output_bytes": _READ_BYTES}, settings, archive)
    return _run(control, asked, settings, None)


def _run(
    control: socket.socket, asked: Mapping[str, Any], settings: Mapping[str, Any], archive: bytes | None
) -> dict[str, Any]:
    """Runs a command, or unpacks an archive, as the user of the box; returns its output and how it ended."""
    ours, theirs = os.pipe()
    os.fchown(theirs, settings["user"], settings["user"])  # for those who open it anew, by /dev/stdout
    try:
        pid = os.fork()
    except OSError as error:  # the commands have taken all processes
        os.close(ours)
        os.close(theirs)
        return {"output": f"fork: {error.strerror}", "exit_code": _NOT_STARTED, "killed": ""}
    if pid == 0:
        try:
            os.setsid()
            for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored_by_python, signal.SIG_DFL)
            for standard, descriptor in ((0, os.open("/dev/null", os.O_RDONLY)), (1, theirs), (2, theirs)):
                os.dup2(descriptor, standard)
            os.closerange(3, 1 << 16)
            _confine(settings)
            if archive is not None:
                with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                    # The archive is ours. Python 3.11.3 and older have no filters, and leave this attribute alone.
                    tar.extraction_filter = lambda member, _: member
                    tar.extractall(asked["directory"])
                os._exit(0)
            os.chdir(asked["directory"])
            os.execve(asked["command"][0], asked["command"], asked["variables"])
        except BaseException as error:  # noqa: BLE001 - whatever failed, no command runs unconfined
            os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(_NOT_STARTED)
    os.close(theirs)
    try:
        return _watch(pid, ours, asked, control)
    finally:
        os.close(ours)


def _watch(pid: int, output: int, asked: Mapping[str, Any], control: socket.socket) -> dict[str, Any]:
    """Reads the output of a command until it ends, is late, or writes too much. What it left in the background goes on.

    Raises `ConnectionError` if the caller ends meanwhile, which asks for nothing before it has the answer.
    """
    os.set_blocking(output, False)
    until, written, killed = time.monotonic() + asked["seconds"], bytearray(), ""
    ended = os.pidfd_open(pid)
    watched: list[Any] = [ended, output, control]
    try:
        while not killed:
            ready, _, _ = select.select(watched, [], [], max(until - time.monotonic(), 0))
            if control in ready:
                killed = "caller"
                raise ConnectionError("the caller has ended")
            if not ready:
                killed = "deadline"
            if output in ready and not _add(output, written):
                watched.remove(output)
            if len(written) > asked["output_bytes"]:
                killed = "output"
            if ended in ready:
                break
    finally:
        os.close(ended)
        if killed:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        status = _collected(pid)
    while len(written) <= asked["output_bytes"] and _add(output, written):
        pass
    text = bytes(written[: asked["output_bytes"]]).decode(errors="replace")
    return {"output": text, "exit_code": None if killed else os.waitstatus_to_exitcode(status), "killed": killed}


def _add(descriptor: int, written: bytearray) -> bool:
    """Adds what is there; returns whether more may come at once."""
    try:
        chunk = os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return False
    written += chunk
    return bool(chunk)


def _collected(pid: int) -> int:
    """Collects the process, and all others that ended, of which this process is the parent; returns its status."""
    _, status = os.waitpid(pid, 0)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return status


def _confine(settings: Mapping[str, Any]) -> None:
    """Gives up every right for what this process becomes."""
    for capability in range(_MOST_CAPABILITY):
        with suppress(OSError):  # one that this kernel does not have
            namespaces.set_process_option(_PR_CAPBSET_DROP, capability)
    user = settings["user"]
    if user:
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    for what, limit in (
        # Not of address space, of which runtimes reserve more than they use.
        (resource.RLIMIT_DATA, settings["memory_bytes"]),
        (resource.RLIMIT_NPROC, settings["processes"]),
        (resource.RLIMIT_FSIZE, settings["files_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(what)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(what, (limit, limit))
    namespaces.set_process_option(namespaces.PR_SET_NO_NEW_PRIVS, 1)
    namespaces.drop_capabilities()
    seccomp.install(commands=True)


def _asked(control: socket.socket) -> dict[str, Any] | None:
    message = MESSAGES.read(control.recv)
    return None if message is None else json.loads(message)


def _say(control: socket.socket, answer: Mapping[str, Any]) -> None:
    control.sendall(MESSAGES.frame(json.dumps(answer).encode()))
