"""The interpreter from which every run of the sandbox is forked: enters namespaces, builds a root of its own, and forks.

It imports what programs usually import, so that a run costs a fork and no start of an interpreter. Its parent, `python_sandbox`,
sends a socket for each run by its standard input, and the process that is forked serves that run (`supervisor`). It ends, and all
runs with it, when that input ends. It holds no secret: its environment is made by its parent, and the files that it could open
are those of the root that it builds. `multiprocessing`'s fork server does not serve: it says by a pickle what a fork is
to run, and it has the environment of its parent. A run must have neither.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import signal
import site
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from counterpoint.environments.sandbox import namespaces
from counterpoint.environments.sandbox.confined import PROGRAM, STREAMS, Program
from counterpoint.environments.sandbox.supervisor import ANSWERS, supervise

# fmt: off
PRELOADED = (
    "abc", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq", "io",
    "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "textwrap", "time", "traceback", "types",
    "typing", "unittest",
)
# fmt: on

_DEVICES = ("null", "zero", "full", "random", "urandom")
_ROOT_BYTES = 1 << 20
"""The size of the root's own file system, which has directories only."""


def main() -> Program:
    """Runs the zygote, and returns in the process of each run what that is to run.

    The first argument is the settings of `python_sandbox.Sandbox` as JSON.
    """
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    try:
        if settings["namespaces"]:
            _enter_namespaces(control, settings)
        for name in PRELOADED:
            __import__(name)
        for define in (site.setquit, site.setcopyright, site.sethelper):
            # They make `exit` and its like; packages of the machine stay out.
            define()
        # Memory allocators of the C library reserve 64 MB for each thread, which would count against a run's memory.
        ctypes.CDLL(None).mallopt(-8, 2)
        sys.path.extend(settings["packages"].values() if settings["namespaces"] else settings["packages"])
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    except OSError as error:
        control.sendall(b"refused " + str(error).encode()[:1000])
        raise SystemExit(1) from error
    control.sendall(b"ready")
    return _serve(control, settings)


def _enter_namespaces(control: socket.socket, settings: Mapping[str, Any]) -> None:
    """Moves into new namespaces and a new root. The caller's process ends with the one that this forks."""
    # Runs are the first to be killed where the machine is out of memory.
    Path("/proc/self/oom_score_adj").write_text("1000")
    namespaces.unshare(namespaces.CLONE_NEWUSER, "user")
    namespaces.set_process_option(namespaces.PR_SET_DUMPABLE, 1)
    control.sendall(b"unshared")
    if control.recv(16) != b"mapped":  # The parent maps our users: it may map two if it is root.
        raise SystemExit(1)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    flags = (
        namespaces.CLONE_NEWNS
        | namespaces.CLONE_NEWNET
        | namespaces.CLONE_NEWIPC
        | namespaces.CLONE_NEWUTS
        | namespaces.CLONE_NEWPID
        | namespaces.CLONE_NEWCGROUP
    )
    namespaces.unshare(flags, "mount, net, ipc, uts, pid, cgroup")
    parent = os.getpid()
    child = os.fork()
    if child:
        control.close()
        os.waitpid(child, 0)
        os._exit(0)
    namespaces.set_process_option(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() not in (0, parent):  # 0: the parent is outside of this namespace
        os._exit(1)
    _build_root(settings)


def _build_root(settings: Mapping[str, Any]) -> None:
    """Makes a root that has the given directories, files and packages of the machine, read-only, and nothing else."""
    targets = {path: path for path in [*settings["directories"], *settings["files"]]} | settings["packages"]
    namespaces.mount("none", "/", None, namespaces.MS_REC | namespaces.MS_PRIVATE)
    # They are opened before the new root hides any of them.
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in targets if Path(path).exists()}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in _DEVICES}
    descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    root = "/tmp"
    flags = namespaces.MS_NOSUID | namespaces.MS_NODEV
    namespaces.mount("sandbox", root, "tmpfs", flags, f"size={_ROOT_BYTES},mode=755")
    os.fchdir(descriptors)
    for path, descriptor in (sources | devices).items():
        target = Path(root + targets.get(path, path))
        if path not in settings["directories"] and target.exists():
            continue  # a library in a directory that is there already
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in settings["directories"] or path in settings["packages"]:
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        # A recursive bind: one that leaves out what is mounted below is refused without the machine's own rights.
        namespaces.mount(str(descriptor), str(target), None, namespaces.MS_BIND | namespaces.MS_REC)
    for path in settings["hidden"]:
        if Path(root + path).is_dir():
            namespaces.mount("hidden", root + path, "tmpfs", flags, f"size={_ROOT_BYTES},mode=755")
    for name in ("/tmp", "/etc", PROGRAM):
        Path(root + name).mkdir(exist_ok=True)
    for directory in ("dev/fd", "proc/self/fd"):
        Path(root, directory).mkdir(parents=True)
    for number, name in enumerate(STREAMS):  # which each run has for itself
        for path in (f"dev/{name}", f"dev/fd/{number}", f"proc/self/fd/{number}"):
            Path(root, path).symlink_to(f"{PROGRAM}/{name}")
    for descriptor in [*sources.values(), *devices.values(), descriptors]:
        os.close(descriptor)
    namespaces.change_root(root)
    namespaces.make_read_only("/")


def _serve(control: socket.socket, settings: Mapping[str, Any]) -> Program:
    """Forks a process for each socket that arrives, until there are no more; returns in that of a program."""
    while True:
        _, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(array.array("i").itemsize))
        if not ancillary:
            raise SystemExit
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        call = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            with suppress(OSError):
                call.sendall(ANSWERS.frame(json.dumps({"refused": f"fork: {error}"}).encode()))
            pid = -1
        if pid == 0:
            control.close()
            return supervise(call, settings)
        call.close()
