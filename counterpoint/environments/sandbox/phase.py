"""A phase of a box: commands in namespaces of their own, until their first process ends, which is ours.

`builder` forks it for the root that it has built. Nothing of a phase outlives it. Without root, commands have the user of the
first process: what they could do to it is refused (`seccomp`), and it imports nothing that could be theirs.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from counterpoint.environments.sandbox import namespaces, seccomp
from counterpoint.transport.frames import Framing

MESSAGES = Framing(1 << 28)
"""Requests and answers: a header as JSON; an archive of files (tar) follows the request `files`."""
PYTHON = "/python"
"""Where the interpreter is, if it is not below /usr."""
PROGRAMS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_READ_BYTES = 1 << 16
_NOT_STARTED = 126
"""The exit code of a command that could not be started, as a shell has it."""
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_PR_CAPBSET_DROP = 24
_MOST_CAPABILITY = 63
NOSUID_NODEV = namespaces.MS_NOSUID | namespaces.MS_NODEV


def serve_phase(control: socket.socket, settings: Mapping[str, Any]) -> None:
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
        namespaces.mount("proc", f"{root}/proc", "proc", NOSUID_NODEV)
        namespaces.mount("shm", f"{root}/dev/shm", "tmpfs", NOSUID_NODEV, f"size={settings['files_bytes']},mode=1777")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
        namespaces.change_root(root)
        sys.meta_path.clear()  # whatever would be imported from now on could be a file of the commands'
        if os.path.isdir(settings["python"]):
            # The interpreter's scripts name it by its place on this machine, where commands may have made one of their own.
            namespaces.mount(PYTHON, settings["python"], None, namespaces.MS_BIND | namespaces.MS_REC)
        _hide_programs_of_commands()
        say(control, {})
        while (asked := asked_of(control)) is not None and asked["do"] != "end":
            say(control, _serve(control, asked, settings))
    except BaseException as error:  # noqa: BLE001 - the caller is told, and the phase ends
        with suppress(OSError):
            say(control, {"refused": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _hide_programs_of_commands() -> None:
    """Takes programs of this machine away that are links to where commands may write, such as /opt."""
    for directory in (f"{PYTHON}/bin", *PROGRAMS):
        with suppress(FileNotFoundError), os.scandir(directory) as entries:
            for link in filter(os.DirEntry.is_symlink, entries):
                with suppress(OSError):  # it leads to no program
                    if link.is_file() and link.stat().st_dev == os.stat("/").st_dev:
                        namespaces.mount("/dev/null", link.path, None, namespaces.MS_BIND)


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


def asked_of(control: socket.socket) -> dict[str, Any] | None:
    """Returns the next request; None when the caller has ended."""
    message = MESSAGES.read(control.recv)
    return None if message is None else json.loads(message)


def say(control: socket.socket, answer: Mapping[str, Any]) -> None:
    """Sends an answer."""
    control.sendall(MESSAGES.frame(json.dumps(answer).encode()))
