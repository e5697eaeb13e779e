"""What the process of a run does: gives up every right, then runs the code as a program.

It is forked from the supervisor. In namespaces it is the first process of its own, so that its end ends all that it may have
started. Setting up comes first; nothing of it can be undone by the code.
"""

from __future__ import annotations

import atexit
import builtins
import io
import linecache
import math
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NoReturn

from environments.tools.sandbox import namespaces, seccomp

FILE_NAME = "program.py"
"""In tracebacks."""

OPEN_FILES = 64
_TROUBLE = 3


def run(
    request: Mapping[str, Any], settings: Mapping[str, Any], directory: str, streams: tuple[int, int, int, int]
) -> NoReturn:
    """Confines this process and runs `request["code"]` in it.

    `streams` become its standard streams; the last is told why the process could not be confined, in which case no code runs.
    """
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        namespaces.set_process_option(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
        for standard, descriptor in enumerate(streams):
            os.dup2(descriptor, standard)
        os.closerange(len(streams), 1 << 16)
        _confine(request, settings, directory)
    except BaseException as error:  # noqa: BLE001 - whatever failed, the code must not run
        os.write(_TROUBLE, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(_TROUBLE)
    os._exit(_execute(request["code"]))


def _confine(request: Mapping[str, Any], settings: Mapping[str, Any], directory: str) -> None:
    isolated = bool(settings["namespaces"])
    files = int(settings["files_bytes"])
    if isolated:
        user = namespaces.INNER_USER if settings["as_root"] else namespaces.INNER_ROOT
        options = f"size={files},nr_inodes=4096,mode=700,uid={user},gid={user}"
        namespaces.mount("work", directory, "tmpfs", namespaces.MS_NOSUID | namespaces.MS_NODEV, options)
        os.chdir(directory)
        if settings["as_root"]:
            os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    else:
        os.setsid()
        os.chdir(directory)
    # Again: the kernel forgets it when the user changes.
    namespaces.set_process_option(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
    memory = int(request["memory_mib"]) << 20
    seconds = math.ceil(request["seconds"])
    if (
        isolated
    ):  # The kernel counts a user's threads in the namespace of users; elsewhere it would count all of ours, too.
        _, most = resource.getrlimit(resource.RLIMIT_NPROC)
        threads = settings["threads"] if most == resource.RLIM_INFINITY else min(most, settings["threads"])
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(what, (limit, limit + (what == resource.RLIMIT_CPU)))
    namespaces.set_process_option(namespaces.PR_SET_NO_NEW_PRIVS, 1)
    if isolated:
        namespaces.drop_capabilities()
        seccomp.install()


def _execute(code: str) -> int:
    """Runs the code as `python program.py` does; returns its exit code."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="backslashreplace"
    )
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True
    )
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.argv = [FILE_NAME]
    for name in [name for name in sys.modules if name.partition(".")[0] == "environments"]:
        del sys.modules[name]
    program = ModuleType("__main__")
    program.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = program
    linecache.cache[FILE_NAME] = (len(code), None, code.splitlines(keepends=True), FILE_NAME)
    exit_code = 0
    try:
        exec(compile(code, FILE_NAME, "exec"), program.__dict__)
    except SystemExit as exit_request:
        exit_code = _exit_code(exit_request.code)
    except BaseException as error:  # noqa: BLE001 - it is shown as Python shows it
        exit_code = 1
        _show(error)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads, as at any program's end
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - likewise
        exit_code = exit_code or 1
        _show(error)
    return exit_code


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _show(error: BaseException) -> None:
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        traceback.print_exception(type(error), error, frames)
    except BaseException:  # noqa: BLE001 - out of memory, or an exception that does not print
        os.write(2, f"{type(error).__name__}\n".encode())
